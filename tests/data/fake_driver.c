/* A stand-in for libcuda.so.1 without a GPU: writes one line per call to $FAKE_DRIVER_LOG.
 *
 * $FAKE_DRIVER_FAIL="name=code" makes the function of that name return that code. There are two devices; each
 * thread starts without a current context. Contexts are device numbers plus 0x100. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint32_t id, pad, value[16];
} attribute;

typedef struct {
    uint32_t grid[3], block[3], smem;
    void *stream;
    attribute *attributes;
    uint32_t count;
} config;

static __thread uintptr_t current;

static FILE *file;

static void open_log(void) {
    file = fopen(getenv("FAKE_DRIVER_LOG"), "a");
    setlinebuf(file);
}

static FILE *out(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_log);
    return file;
}

static int result(const char *name) {
    const char *fail = getenv("FAKE_DRIVER_FAIL");
    size_t length = strlen(name);
    if (fail && !strncmp(fail, name, length) && fail[length] == '=') return atoi(fail + length + 1);
    return 0;
}

int cuInit(unsigned flags) { return fprintf(out(), "cuInit %u\n", flags), result("cuInit"); }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuGetErrorName(int code, const char **name) {
    *name = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
    return 0;
}
int cuGetErrorString(int code, const char **text) {
    *text = code == 1 ? "invalid argument" : "something else";
    return 0;
}
int cuCtxGetDevice(int *device) {
    if (!current) return 201;
    *device = (int)(current - 0x100);
    return result("cuCtxGetDevice");
}
int cuCtxGetCurrent(void **context) { return *context = (void *)current, 0; }
int cuCtxSetCurrent(void *context) {
    current = (uintptr_t)context;
    return fprintf(out(), "cuCtxSetCurrent %#lx\n", (long)current), result("cuCtxSetCurrent");
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(uintptr_t)(0x100 + device);
    return fprintf(out(), "cuDevicePrimaryCtxRetain %d\n", device), result("cuDevicePrimaryCtxRetain");
}
int cuDeviceGetAttribute(int *value, int number, int device) {
    *value = number == 97 ? 232448 : -1;
    return fprintf(out(), "cuDeviceGetAttribute %d %d\n", number, device), 0;
}
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    (void)a, (void)b, (void)d, (void)e;
    *library = (void *)0x1000;
    fprintf(out(), "cuLibraryLoadData %#x %u %u\n", *(const uint32_t *)code, c, f);
    return result("cuLibraryLoadData");
}
int cuLibraryUnload(void *library) { return fprintf(out(), "cuLibraryUnload %p\n", library), 0; }
int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    static uintptr_t handles = 0x2000;
    *kernel = (void *)++handles;
    fprintf(out(), "cuLibraryGetKernel %p %p %s\n", *kernel, library, name);
    return result("cuLibraryGetKernel");
}
int cuKernelGetAttribute(int *value, int number, void *kernel, int device) {
    *value = 1024;
    return fprintf(out(), "cuKernelGetAttribute %d %p %d\n", number, kernel, device), 0;
}
int cuKernelSetAttribute(int number, int value, void *kernel, int device) {
    fprintf(out(), "cuKernelSetAttribute %d %d %p %d\n", number, value, kernel, device);
    return result("cuKernelSetAttribute");
}
int cuLaunchKernelEx(const config *c, void *kernel, void **arguments, void **extra) {
    FILE *f = out();
    flockfile(f); /* other threads launch too, and this line is written in parts */
    fprintf(f, "cuLaunchKernelEx %p grid %u %u %u block %u %u %u smem %u stream %p context %#lx", kernel, c->grid[0],
            c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->smem, c->stream, (long)current);
    for (uint32_t i = 0; i < c->count; i++)
        fprintf(f, " attribute %u %u %u %u", c->attributes[i].id, c->attributes[i].value[0],
                c->attributes[i].value[1], c->attributes[i].value[2]);
    const char *places = getenv("FAKE_DRIVER_ARGUMENTS"); /* of 8-byte arguments: "20 21" */
    for (char *end; places && *places; places = end) {
        long place = strtol(places, &end, 10);
        if (end == places) break;
        fprintf(f, " argument %ld %#lx", place, *(long *)arguments[place]);
    }
    fprintf(f, " first %#lx extra %p\n", *(long *)arguments[0], (void *)extra);
    funlockfile(f);
    return result("cuLaunchKernelEx");
}
