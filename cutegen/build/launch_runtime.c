/* What a compiled kernel library needs from the CUDA driver, and nothing else.
 *
 * The CuTe DSL compiles host code that calls a few functions of its own run-time library. Linking this file
 * instead makes each kernel library independent of the DSL: it needs libtvm_ffi and, at the first launch,
 * the driver's libcuda.so.1. Loading such a library works without a GPU.
 *
 * The host code calls, for every launch, in this order:
 *   cuda_dialect_init_library_once(state, init, load_to_device, raise)   init loads the device code
 *   _cudaGetDevice, and _cudaSetDevice(device of the tensors) when they differ
 *   _cudaLaunchKernelEx, once per kernel
 *   _cudaSetDevice(previous device) when they differed
 *   CuteDSLRT_TVMFFISetRaisedCudaError(raise_parts, code) when any of these returned another code than 0 or -1
 * load_to_device looks the kernels up and raises their shared-memory and cluster limits on one device; it runs
 * once per device, when that device is first used, so that no context appears on devices nobody uses.
 *
 * Attribute numbers and the layout of launch attributes are the same in the CUDA runtime and the driver API
 * (cuda.h and driver_types.h of CUDA 12.0 to 13.0); only the launch configuration differs and is converted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

/* glibc 2.34 moved these into libc under a new version; the old version exists on both sides of the move. */
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
__asm__(".symver dlerror,dlerror@GLIBC_2.2.5");
#endif

#define EXPORT __attribute__((visibility("default")))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define MAX_DEVICES 64
#define ALREADY_RAISED (-1)
#define CUDA_ERROR_INVALID_CONTEXT 201
#define CLUSTER_DIMENSION 4
#define NO_DEVICE (-1)

typedef struct {
    uint32_t id;
    uint32_t pad;
    union {
        uint32_t dim[3];
        char bytes[64];
    } value;
} launch_attribute;

typedef struct {
    uint32_t grid[3], block[3];
    size_t smem;
    void *stream;
    launch_attribute *attributes;
    uint32_t attribute_count;
} runtime_config;

typedef struct {
    uint32_t grid[3], block[3];
    uint32_t smem;
    void *stream;
    launch_attribute *attributes;
    uint32_t attribute_count;
} driver_config;

_Static_assert(sizeof(launch_attribute) == 72, "launch attribute");
_Static_assert(offsetof(runtime_config, stream) == 32 && sizeof(runtime_config) == 56, "runtime config");
_Static_assert(offsetof(driver_config, stream) == 32 && sizeof(driver_config) == 56, "driver config");

static struct {
    int (*init)(unsigned);
    int (*error_name)(int, const char **);
    int (*error_text)(int, const char **);
    int (*ctx_get_device)(int *);
    int (*ctx_get_current)(void **);
    int (*ctx_set_current)(void *);
    int (*primary_retain)(void **, int);
    int (*device_attribute)(int *, int, int);
    int (*load_library)(void **, const void *, void *, void *, unsigned, void *, void *, unsigned);
    int (*unload_library)(void *);
    int (*find_kernel)(void **, void *, const char *);
    int (*kernel_get)(int *, int, void *, int);
    int (*kernel_set)(int, int, void *, int);
    int (*launch)(const driver_config *, void *, void **, void **);
} driver;

static const struct {
    const char *name;
    void *slot;
} driver_symbols[] = {
    {"cuInit", &driver.init},
    {"cuGetErrorName", &driver.error_name},
    {"cuGetErrorString", &driver.error_text},
    {"cuCtxGetDevice", &driver.ctx_get_device},
    {"cuCtxGetCurrent", &driver.ctx_get_current},
    {"cuCtxSetCurrent", &driver.ctx_set_current},
    {"cuDevicePrimaryCtxRetain", &driver.primary_retain},
    {"cuDeviceGetAttribute", &driver.device_attribute},
    {"cuLibraryLoadData", &driver.load_library},
    {"cuLibraryUnload", &driver.unload_library},
    {"cuLibraryGetKernel", &driver.find_kernel},
    {"cuKernelGetAttribute", &driver.kernel_get},
    {"cuKernelSetAttribute", &driver.kernel_set},
    {"cuLaunchKernelEx", &driver.launch},
};

typedef int (*init_fn)(void **library);
typedef int (*load_fn)(void **library, int device);
typedef void (*raise_fn)(const char *kind, const char *message);
typedef void (*raise_parts_fn)(const char *kind, const char **parts, int32_t count);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int driver_ready;
static void *library;
static load_fn load_to_device;
static pid_t owner; /* a forked child must not touch the parent's CUDA objects */
static _Atomic uint8_t prepared[MAX_DEVICES];
static _Atomic(void *) primary[MAX_DEVICES];

/* Per thread, touched only off the warm path: where a failure happened, and the context to return to. */
static __thread struct {
    int code;
    char text[256];
} failure;
static __thread struct {
    void *context;
    int device;
} before;

static const char ERROR_KIND[] = "CutegenLaunchError";

static int fail(int code, const char *where) {
    failure.code = code;
    snprintf(failure.text, sizeof failure.text, "%s", where);
    return code;
}

static int fail_launch(int code, const runtime_config *c) {
    uint32_t cluster[3] = {1, 1, 1};
    for (uint32_t i = 0; i < c->attribute_count; i++)
        if (c->attributes[i].id == CLUSTER_DIMENSION)
            for (int d = 0; d < 3; d++) cluster[d] = c->attributes[i].value.dim[d];
    failure.code = code;
    snprintf(failure.text, sizeof failure.text,
             "cuLaunchKernelEx (grid %ux%ux%u, block %ux%ux%u, cluster %ux%ux%u, %zu bytes of shared memory)",
             c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], cluster[0], cluster[1],
             cluster[2], c->smem);
    return code;
}

static void describe(int code, char *out, size_t size) {
    const char *name = NULL, *text = NULL;
    if (driver.error_name) driver.error_name(code, &name);
    if (driver.error_text) driver.error_text(code, &text);
    const char *where = failure.code == code && failure.text[0] ? failure.text : "a call of the CUDA driver";
    snprintf(out, size, "%s failed: %s (%d): %s", where, name ? name : "CUDA error", code, text ? text : "unknown");
    failure.code = 0;
}

static int open_driver(raise_fn raise) {
    char message[512];
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *reason = dlerror();
        snprintf(message, sizeof message, "no CUDA driver: %s", reason ? reason : "libcuda.so.1 cannot be opened");
        raise(ERROR_KIND, message);
        return ALREADY_RAISED;
    }
    for (size_t i = 0; i < sizeof driver_symbols / sizeof *driver_symbols; i++) {
        void *symbol = dlsym(handle, driver_symbols[i].name);
        if (!symbol) {
            snprintf(message, sizeof message, "the CUDA driver has no %s; CUDA 12.0 or later is needed",
                     driver_symbols[i].name);
            raise(ERROR_KIND, message);
            return ALREADY_RAISED;
        }
        *(void **)driver_symbols[i].slot = symbol;
    }
    int code = driver.init(0);
    if (code) return fail(code, "cuInit");
    driver_ready = 1;
    return 0;
}

/* Loads the device code; the mutex is held. */
static int start(void **state, init_fn init, load_fn load, raise_fn raise) {
    if (!driver_ready) {
        int code = open_driver(raise);
        if (code) return code;
    }
    int code = init(&library);
    if (code) return code;
    load_to_device = load;
    owner = getpid();
    atomic_store_explicit((_Atomic(void *) *)state, library, memory_order_release);
    return 0;
}

EXPORT int cuda_dialect_init_library_once(void **state, init_fn init, load_fn load, raise_fn raise) {
    if (LIKELY(atomic_load_explicit((_Atomic(void *) *)state, memory_order_acquire) != NULL)) return 0;
    int code = 0;
    pthread_mutex_lock(&mutex);
    if (!*state) code = start(state, init, load, raise);
    pthread_mutex_unlock(&mutex);
    if (code > 0) {
        char message[512];
        describe(code, message, sizeof message);
        raise(ERROR_KIND, message);
        code = ALREADY_RAISED;
    }
    return code;
}

EXPORT void cuda_dialect_unload_library_once(void **state) {
    if (*state && owner == getpid()) driver.unload_library(*state);
    *state = NULL;
}

EXPORT void CuteDSLRT_TVMFFISetRaisedCudaError(raise_parts_fn raise, int code) {
    char message[512];
    const char *parts[1] = {message};
    describe(code, message, sizeof message);
    raise(ERROR_KIND, parts, 1);
}

/* First use of a device: its kernels are looked up and their limits raised. */
static int prepare(int device) {
    int code = 0;
    pthread_mutex_lock(&mutex);
    if (device >= MAX_DEVICES || !atomic_load_explicit(&prepared[device], memory_order_relaxed)) {
        code = load_to_device(&library, device);
        if (!code && device < MAX_DEVICES) atomic_store_explicit(&prepared[device], 1, memory_order_release);
    }
    pthread_mutex_unlock(&mutex);
    return code;
}

static inline int ensure_prepared(int device) {
    if (LIKELY(device < MAX_DEVICES && atomic_load_explicit(&prepared[device], memory_order_acquire))) return 0;
    return prepare(device);
}

EXPORT int _cudaGetDevice(int *device) {
    int code = driver.ctx_get_device(device);
    if (LIKELY(!code)) return ensure_prepared(*device);
    if (code != CUDA_ERROR_INVALID_CONTEXT) return fail(code, "cuCtxGetDevice");
    *device = NO_DEVICE; /* differs from every tensor's device, so _cudaSetDevice follows */
    return 0;
}

static int primary_context(int device, void **context) {
    if (device < MAX_DEVICES && (*context = atomic_load_explicit(&primary[device], memory_order_acquire))) return 0;
    int code = driver.primary_retain(context, device);
    if (code) return fail(code, "cuDevicePrimaryCtxRetain");
    if (device < MAX_DEVICES) atomic_store_explicit(&primary[device], *context, memory_order_release);
    return 0;
}

EXPORT int _cudaSetDevice(int device) {
    void *context = NULL;
    int code;
    if (device == NO_DEVICE) return 0; /* the thread had no context: the primary one stays, as cudart has it */
    if (before.context && before.device == device) {
        context = before.context; /* back to what was current, which need not be a primary context */
        before.context = NULL;
    } else {
        if (driver.ctx_get_current(&before.context) || driver.ctx_get_device(&before.device)) before.context = NULL;
        if ((code = primary_context(device, &context))) return code;
    }
    if ((code = driver.ctx_set_current(context))) return fail(code, "cuCtxSetCurrent");
    return ensure_prepared(device);
}

EXPORT int _cudaLaunchKernelEx(const runtime_config *c, void *kernel, void **arguments) {
    driver_config config = {{c->grid[0], c->grid[1], c->grid[2]},
                            {c->block[0], c->block[1], c->block[2]},
                            (uint32_t)c->smem,
                            c->stream,
                            c->attributes,
                            c->attribute_count};
    int code = driver.launch(&config, kernel, arguments, NULL);
    return LIKELY(!code) ? 0 : fail_launch(code, c);
}

EXPORT int _cudaLibraryLoadData(void **out, const void *code, void *jit_options, void *jit_values, unsigned jit_count,
                                void *options, void *values, unsigned count) {
    int result = driver.load_library(out, code, jit_options, jit_values, jit_count, options, values, count);
    return result ? fail(result, "cuLibraryLoadData") : 0;
}

EXPORT int _cudaLibraryGetKernel(void **kernel, void *from, const char *name) {
    int code = driver.find_kernel(kernel, from, name);
    return code ? fail(code, "cuLibraryGetKernel") : 0;
}

EXPORT int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    int code = driver.device_attribute(value, attribute, device);
    return code ? fail(code, "cuDeviceGetAttribute") : 0;
}

EXPORT int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    int code = driver.kernel_get(value, attribute, kernel, device);
    return code ? fail(code, "cuKernelGetAttribute") : 0;
}

EXPORT int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    int code = driver.kernel_set(attribute, value, kernel, device);
    return code ? fail(code, "cuKernelSetAttribute") : 0;
}

EXPORT int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
    int device;
    int code = driver.ctx_get_device(&device);
    return code ? fail(code, "cuCtxGetDevice") : _cudaKernelSetAttributeForDevice(kernel, attribute, value, device);
}
