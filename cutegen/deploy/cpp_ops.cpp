/* The operator cutegen_pinned::gemm of a deployment, in the stable ABI of torch: no Python, no cutegen, no tvm-ffi.
 *
 * Compiled together with tables.h, which says what is pinned, and linked with the objects of the kernels. These call
 * three functions of tvm-ffi, which are defined at the end of this file and seen by nobody else. */
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstring>
#include <fstream>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

/* DLPack and tvm-ffi's calling convention, as the kernels have them. */
struct DLTensor {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t byte_offset;
};
struct Any {
    int32_t type_index;
    uint32_t padding;
    union {
        int64_t integer;
        double real;
        const void *pointer;
    };
};
constexpr int32_t kInt = 1, kFloat = 3, kTensor = 7, kCuda = 2;
using Function = int (*)(void *, const Any *, int32_t, Any *);

enum { M, N, K, BATCH, SIZES };

struct Kernel {
    const char *symbol;
    Function function;
};
struct Launch {
    int kernel; /* -1: torch computes it; -2: nothing does */
    int64_t workspace_bytes;
    bool zeroed;
    int first_scalar, scalars;
};
struct Record {
    int64_t sizes[SIZES];
    uint64_t kind;
    Launch launch;
};
struct Step {
    int64_t last;
    Launch launch;
};
struct Range {
    int64_t sizes[SIZES];
    uint64_t kind;
    int size;
    int64_t first, multiple_of;
    int first_step, steps;
};
struct Dtype {
    const char *name;
    int scalar_type;
    uint8_t code, bits;
    int result; /* the dtype that torch would give */
};

#include "tables.h"

struct Key {
    int64_t sizes[SIZES];
    uint64_t kind;
    bool operator==(const Key &other) const { return !std::memcmp(this, &other, sizeof *this); }
};
struct Hash {
    size_t operator()(const Key &key) const {
        uint64_t hash = key.kind;
        for (int64_t size : key.sizes) hash = (hash ^ (uint64_t)size) * 0x9e3779b97f4a7c15u;
        return hash ^ hash >> 29;
    }
};

thread_local void *current_stream;
thread_local std::string raised;

template <typename... Parts> [[noreturn]] void refuse(const Parts &...parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw std::runtime_error(text.str());
}

/* The headers have a macro for this, under another name in every other version. */
void check(AOTITorchError code) {
    if (code != AOTI_TORCH_SUCCESS) refuse("torch refused a call of its C interface, error ", code);
}

std::string shape_of(const Tensor &tensor) {
    std::ostringstream text;
    const char *comma = "";
    for (int64_t size : tensor.sizes()) text << comma << size, comma = ", ";
    return "(" + text.str() + ")";
}

int dtype_of(const Tensor &tensor) {
    for (size_t at = 0; at < std::size(DTYPES); at++)
        if ((int)tensor.scalar_type() == DTYPES[at].scalar_type) return (int)at;
    refuse("an operand has a dtype that no kernel takes");
}

/* Whether every row starts at a multiple of 16 bytes. */
bool is_aligned(const Tensor &tensor) {
    const int64_t bytes = DTYPES[dtype_of(tensor)].bits / 8, last = tensor.dim() - 1;
    if ((uintptr_t)tensor.data_ptr() % 16 || tensor.size(last) * bytes % 16) return false;
    for (int64_t at = 0; at < last; at++)
        if (tensor.size(at) > 1 && tensor.stride(at) * bytes % 16) return false;
    return true;
}

/* The axis along which an operand is contiguous: 0 for its rows' direction, 1 along a row. */
int axis_of(const Tensor &tensor) {
    const int64_t dim = tensor.dim();
    const bool row = tensor.stride(dim - 1) == 1, column = tensor.stride(dim - 2) == 1;
    if (!row && !column) refuse("an operand's rows or columns must be contiguous; copy it");
    return row && (!column || tensor.size(dim - 1) >= tensor.size(dim - 2));
}

/* --- where a call runs --- */

void *driver(const char *name) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, name) : nullptr;
}

void check_gpu(int index) {
    auto get = (int (*)(int *, int))driver("cuDeviceGet");
    auto named = (int (*)(char *, int, int))driver("cuDeviceGetName");
    auto attribute = (int (*)(int *, int, int))driver("cuDeviceGetAttribute");
    int device = 0, major = 0, minor = 0, sms = 0;
    char name[256] = "";
    if (!get || !named || !attribute || get(&device, index) || named(name, sizeof name, device) ||
        attribute(&major, 75, device) || attribute(&minor, 76, device) || attribute(&sms, 16, device))
        refuse("the CUDA driver does not say what GPU ", index, " is");
    std::ostringstream capability;
    capability << major << "." << minor;
    if (*GPU_NAME && GPU_NAME != std::string(name)) refuse("pinned for ", GPU_NAME, ", but GPU ", index, " is ", name);
    if (*CAPABILITY && CAPABILITY != capability.str())
        refuse("pinned for compute capability ", CAPABILITY, ", but GPU ", index, " has ", capability.str());
    if (SM_COUNT && SM_COUNT != sms) refuse("pinned for ", SM_COUNT, " SMs, but GPU ", index, " has ", sms);
}

void check_cpu() {
    std::ifstream file("/proc/cpuinfo");
    std::string line;
    while (std::getline(file, line) && line.compare(0, 5, "flags")) {}
    if (line.compare(0, 5, "flags")) return;
    for (const char *flag : CPU_FLAGS)
        if ((line + " ").find(std::string(" ") + flag + " ") == std::string::npos)
            refuse("this CPU lacks ", flag, ", which the kernels' launch code may use");
}

void *stream_of(int index) {
    using Get = int32_t (*)(int32_t, void **);
    /* libtorch_cuda.so is loaded where there are CUDA tensors; a build of torch without it must load us too. */
    static Get get = [] {
        void *library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
        void *found = dlsym(library ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
        return (Get)found;
    }();
    void *stream = nullptr;
    if (!get || get(index, &stream)) refuse("torch does not say what the current stream of GPU ", index, " is");
    return stream;
}

void check_place(const std::vector<const Tensor *> &tensors) {
    const int index = tensors[0]->get_device_index();
    for (const Tensor *tensor : tensors) {
        if (tensor->is_cpu() != ON_CPU || (!ON_CPU && !tensor->is_cuda()))
            refuse("an operand of cutegen_pinned::gemm is not on a GPU; move it there");
        if (tensor->get_device_index() != index) refuse("operands are on several GPUs; they must be on one");
    }
    static std::once_flag cpu;
    static std::array<std::atomic<bool>, 64> trusted;
    std::call_once(cpu, check_cpu);
    if (ON_CPU || (index >= 0 && index < 64 && trusted[index])) return;
    check_gpu(index);
    if (index >= 0 && index < 64) trusted[index] = true;
}

/* --- what answers a call --- */

const Launch *of_range(const Key &key) {
    for (const Range &range : RANGES) {
        bool same = range.kind == key.kind;
        for (int at = 0; at < SIZES; at++) same = same && (at == range.size || range.sizes[at] == key.sizes[at]);
        const int64_t size = key.sizes[range.size];
        if (!same || size < range.first || size % range.multiple_of) continue;
        int low = range.first_step, high = low + range.steps;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (STEPS[middle].last < size) low = middle + 1;
            else high = middle;
        }
        if (low < range.first_step + range.steps && STEPS[low].launch.kernel > -2) return &STEPS[low].launch;
    }
    return nullptr;
}

const Launch *find(const Key &key) {
    static const std::unordered_map<Key, const Launch *, Hash> known = [] {
        std::unordered_map<Key, const Launch *, Hash> found;
        for (const Record &record : RECORDS) {
            Key key;
            std::memcpy(key.sizes, record.sizes, sizeof key.sizes);
            key.kind = record.kind;
            found.emplace(key, &record.launch);
        }
        return found;
    }();
    const auto exact = known.find(key);
    return exact == known.end() ? of_range(key) : exact->second;
}

struct Options {
    bool alpha, beta;
    std::string activation;
    bool fast_accum, any_order;
};

Key key_of(const Tensor &a, const Tensor &b, const Tensor &out, const Optional &c, const Optional &bias, bool scaled,
           const Options &options) {
    const int64_t dim = a.dim(), m = a.size(dim - 2), k = a.size(dim - 1), n = b.size(b.dim() - 1);
    const int ab = dtype_of(a), result = dtype_of(out);
    if (dtype_of(b) != ab || (c && dtype_of(*c) != result) || (bias && dtype_of(*bias) != result))
        refuse("a and b must have one dtype, and so must the result, c and bias");
    if (c && shape_of(*c) != shape_of(out)) refuse("c has shape ", shape_of(*c), "; it must be ", shape_of(out));
    uint64_t along = 0;
    if (bias) {
        const bool row = bias->dim() == 1 && bias->size(0) == n;
        const bool column = bias->dim() == 2 && bias->size(0) == m && bias->size(1) == 1;
        if ((!row && !column) || (bias->numel() > 1 && bias->stride(0) != 1))
            refuse("bias has shape ", shape_of(*bias), "; it must be (", n, ") or (", m, ", 1), contiguous");
        along = row ? 1 : 2;
    }
    size_t activation = 0;
    while (activation < std::size(ACTIVATIONS) && options.activation != ACTIVATIONS[activation]) activation++;
    if (activation == std::size(ACTIVATIONS)) refuse("no kernel has the activation ", options.activation);
    const bool fp8 = !std::strcmp(DTYPES[ab].name, "e4m3") || !std::strcmp(DTYPES[ab].name, "e5m2");
    const bool unaligned = !is_aligned(out) || (c && !is_aligned(*c));
    /* The order of KIND in cpp_library.py. */
    const std::array<std::pair<uint64_t, int>, 11> parts = {{
        {(uint64_t)ab, 4}, {(uint64_t)result, 4}, {(uint64_t)axis_of(a), 1}, {(uint64_t)axis_of(b), 1},
        {unaligned, 1}, {options.alpha, 1}, {options.beta, 1}, {along, 2}, {activation, 4},
        {scaled, 1}, {(uint64_t)(fp8 && !options.fast_accum) << 1 | (uint64_t)options.any_order, 2},
    }};
    Key key = {{m, n, k, dim == 3 ? a.size(0) : 1}, 0};
    for (const auto &[value, bits] : parts) key.kind = key.kind << bits | value;
    return key;
}

/* --- the launch --- */

struct Block {
    DLTensor tensor;
    std::array<int64_t, 3> shape, strides;
};

void describe(Block &block, const Tensor &tensor) {
    const int64_t dim = tensor.dim();
    int ndim = 0, inner = -1;
    for (int64_t at = dim == 3 && tensor.size(0) == 1; at < dim; at++, ndim++) {
        block.shape[ndim] = tensor.size(at), block.strides[ndim] = tensor.stride(at);
        if (block.strides[ndim] == 1 && (inner < 0 || block.shape[ndim] > block.shape[inner])) inner = ndim;
    }
    if (inner < 0) inner = ndim - 1;
    for (int at = 0; ndim > 1 && at < ndim; at++) /* odd strides along axes of size 1 */
        if (block.shape[at] == 1 && at != inner) block.strides[at] = (block.shape[inner] + 15) / 16 * 16;
    const Dtype &dtype = DTYPES[dtype_of(tensor)];
    block.tensor = {tensor.data_ptr(), ON_CPU ? 1 : kCuda, tensor.get_device_index(), ndim, dtype.code, dtype.bits, 1,
                    block.shape.data(), block.strides.data(), 0};
}

void vector(Block &block, const Tensor &tensor) {
    describe(block, tensor);
    block.shape[0] = tensor.numel(), block.strides[0] = 1, block.tensor.ndim = 1;
}

Tensor empty(const std::vector<int64_t> &sizes, ScalarType dtype, const Tensor &like) {
    int32_t device_type;
    AtenTensorHandle handle;
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t at = sizes.size(); at-- > 1;) strides[at - 1] = strides[at] * std::max<int64_t>(sizes[at], 1);
    check(aoti_torch_get_device_type(like.get(), &device_type));
    check(aoti_torch_empty_strided((int64_t)sizes.size(), sizes.data(), strides.data(), (int32_t)dtype, device_type,
                                   like.get_device_index(), &handle));
    return Tensor(handle);
}

void launch(const Launch &how, const std::vector<const Tensor *> &matrices, const std::vector<const Tensor *> &vectors,
            const std::vector<double> &factors) {
    std::array<Block, 8> blocks;
    std::vector<Any> arguments;
    size_t used = 0;
    auto pass = [&](const Tensor &tensor, void (*as)(Block &, const Tensor &)) {
        as(blocks[used], tensor);
        Any argument = {kTensor, 0, {}};
        argument.pointer = &blocks[used++].tensor;
        arguments.push_back(argument);
    };
    for (const Tensor *tensor : matrices) pass(*tensor, describe);
    for (const Tensor *tensor : vectors) pass(*tensor, vector);
    std::optional<Tensor> workspace; /* returned to the allocator after the launch: in stream order, that is safe */
    if (how.workspace_bytes) {
        workspace = empty({(how.workspace_bytes + 3) / 4}, ScalarType::Float, *matrices[0]);
        if (how.zeroed) torch::stable::zero_(*workspace);
        pass(*workspace, vector);
    }
    for (int at = 0; at < how.scalars; at++) {
        Any argument = {kInt, 0, {}};
        argument.integer = SCALARS[how.first_scalar + at];
        arguments.push_back(argument);
    }
    for (double factor : factors) {
        Any argument = {kFloat, 0, {}};
        argument.real = factor;
        arguments.push_back(argument);
    }
    Any result = {};
    void *const before = current_stream;
    current_stream = ON_CPU ? nullptr : stream_of(matrices[0]->get_device_index());
    const int status = KERNELS[how.kernel].function(nullptr, arguments.data(), (int32_t)arguments.size(), &result);
    current_stream = before;
    if (status) refuse("kernel ", KERNELS[how.kernel].symbol, " refused the call: ", raised);
}

void check_shapes(const Tensor &a, const Tensor &b) {
    const int64_t dim = a.dim();
    if ((dim != 2 && dim != 3) || b.dim() != dim || a.size(dim - 1) != b.size(dim - 2) ||
        (dim == 3 && a.size(0) != b.size(0)))
        refuse("a has shape ", shape_of(a), " and b ", shape_of(b), "; they do not multiply");
}

ScalarType result_dtype(const Tensor &a, const std::optional<ScalarType> &out_dtype) {
    return out_dtype ? *out_dtype : (ScalarType)DTYPES[dtype_of(a)].result;
}

Tensor gemm(const Tensor &a, const Tensor &b, const Optional &c, const Optional &bias, const Optional &scale_a,
            const Optional &scale_b, double alpha, double beta, const std::string &activation,
            const std::optional<ScalarType> &out_dtype, bool fast_accum, bool any_order) {
    check_shapes(a, b);
    if (scale_a.has_value() != scale_b.has_value()) refuse("pass scale_a and scale_b, or neither");
    std::vector<int64_t> sizes(a.sizes().begin(), a.sizes().end());
    sizes.back() = b.size(b.dim() - 1);
    const Optional addend = beta == 0 ? Optional() : c;
    std::vector<const Tensor *> matrices = {&a, &b, nullptr}, vectors, all = {&a, &b};
    for (const Optional *each : {&addend, &bias, &scale_a, &scale_b})
        if (*each) all.push_back(&**each);
    check_place(all);
    const Tensor out = empty(sizes, result_dtype(a, out_dtype), a);
    if (!out.numel()) return out;
    const Options options = {alpha != 1, addend.has_value(), activation, fast_accum, any_order};
    const Key key = key_of(a, b, out, addend, bias, scale_a.has_value(), options);
    const Launch *how = find(key);
    const bool plain = !options.alpha && !addend && !bias && !scale_a && activation.empty() && !any_order;
    if (!how && !(OUTSIDE_TORCH && plain && dtype_of(a) == dtype_of(out)))
        refuse("no kernel is pinned for m=", key.sizes[M], " n=", key.sizes[N], " k=", key.sizes[K], " batch=",
               key.sizes[BATCH], " of ", DTYPES[dtype_of(a)].name, " with these options; pinned: ", PINNED);
    if (!how || how->kernel < 0) return torch::stable::matmul(a, b);
    matrices[2] = &out;
    std::vector<double> factors;
    if (options.alpha) factors.push_back(alpha);
    if (addend) matrices.push_back(&*addend), factors.push_back(beta);
    for (const Optional *each : {&bias, &scale_a, &scale_b})
        if (*each) vectors.push_back(&**each);
    launch(*how, matrices, vectors, factors);
    return out;
}

/* Shape and dtype of the result, for tracing: through torch's own operators, which know symbolic sizes. */
Tensor meta(const Tensor &a, const Tensor &b, const Optional &, const Optional &, const Optional &, const Optional &,
            double, double, const std::string &, const std::optional<ScalarType> &out_dtype, bool, bool) {
    const ScalarType dtype = result_dtype(a, out_dtype);
    if (a.scalar_type() == dtype) return torch::stable::matmul(a, b);
    return torch::stable::matmul(torch::stable::to(a, dtype), torch::stable::to(b, dtype));
}

}  // namespace

STABLE_TORCH_LIBRARY(cutegen_pinned, library) { library.def(SCHEMA); }

STABLE_TORCH_LIBRARY_IMPL(cutegen_pinned, CompositeExplicitAutograd, library) {
    library.impl("gemm", TORCH_BOX(&gemm));
}

STABLE_TORCH_LIBRARY_IMPL(cutegen_pinned, Meta, library) { library.impl("gemm", TORCH_BOX(&meta)); }

/* --- what the kernels call --- */

#define FFI extern "C" __attribute__((visibility("hidden")))

FFI void *TVMFFIEnvGetStream(int32_t, int32_t) { return current_stream; }

FFI void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) {
    raised = std::string(kind) + ": " + message;
}

FFI void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
    raised = std::string(kind) + ": ";
    for (int32_t at = 0; at < count; at++) raised += parts[at];
}
