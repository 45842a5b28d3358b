/* A kernel of the real call interface that launches nothing: it appends what it was given to $KERNEL_LOG.
 *
 * Compile with -DENTRY=__tvm_ffi_<symbol>. Built against tvm-ffi's own headers, so that it notices when the
 * loader packs arguments in another way. */
#include <stdio.h>
#include <stdlib.h>

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

static void tensor(FILE *out, const DLTensor *t) {
    fprintf(out, "tensor %p dev%d:%d dtype%d.%d.%d", t->data, t->device.device_type, t->device.device_id,
            t->dtype.code, t->dtype.bits, t->dtype.lanes);
    for (int i = 0; i < t->ndim; i++) fprintf(out, " %ld/%ld", (long)t->shape[i], (long)t->strides[i]);
    fprintf(out, " +%ld\n", (long)t->byte_offset);
}

TVM_FFI_DLL_EXPORT int ENTRY(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    if (getenv("KERNEL_FAILS")) {
        TVMFFIErrorSetRaisedFromCStr("ValueError", "Misaligned Tensor data on argument #0");
        return -1;
    }
    FILE *out = fopen(getenv("KERNEL_LOG"), "a");
    fprintf(out, "call stream %p\n", TVMFFIEnvGetStream(kDLCUDA, 0));
    for (int i = 0; i < count; i++) {
        if (args[i].type_index == kTVMFFIDLTensorPtr) tensor(out, (const DLTensor *)args[i].v_ptr);
        if (args[i].type_index == kTVMFFIInt) fprintf(out, "int %ld\n", (long)args[i].v_int64);
        if (args[i].type_index == kTVMFFIFloat) fprintf(out, "float %g\n", args[i].v_float64);
    }
    fclose(out);
    result->type_index = kTVMFFINone;
    return 0;
}
