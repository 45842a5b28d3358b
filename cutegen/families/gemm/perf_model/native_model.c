// The loops of kernel_set.py, roofline.py, fitted.py, trees.py and few_rows.py for one problem. numpy takes longer to
// begin each of their many operations than to do it, which a first call waits for.
//
// The numbers are the same to the last bit: operations come in the same order, are never contracted, and
// logarithms stay numpy's. tests/test_native_model.py compares all of it.
#include <math.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define GATHERS
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))

// DEPTH: of the trees of the fits that ship.
enum { LANES = 8, MOST_FEATURES = 64, DEPTH = 6, FLOATS_OF_LINE = 16, AHEAD = 16 };

// Rows of features that sizes decide, in the order of native_model.ROWS.
enum { SPLIT, M, N, K, WAVES_LOG, LAST_WAVE, TO_MEMORY, TIME, REDUCE, L2, EPILOGUE, CLUSTERS_N, INSIDE_M,
       INSIDE_N, STEPS, BUSY, WAVES };

// Of every kernel: members of KernelColumns and KernelSet of the same names, by axis of the kernel where they
// have one.
struct kernels {
    int64_t count, whole, stride, features;
    const double *tiles, *sides, *blocks, *resident, *sum_us, *inner_us, *mma_us, *epilogue_us,
        *least, *filling;
    const float *tile_k, *part;
    const uint8_t *swap_ab, *pingpong;
    const int32_t *rows;
    double sms, l2_us, l2_us_sm, fixed_us, reduce_us, most_waves, most_clusters, split_tiles;
    double in_bytes, out_bytes, l2_bytes, kept, near;  // traffic.py: bytes of an element, L2, and its constants
    double memory_bytes_us;
    float most_split, last;
};

// Of one thread. raw: rounds, compute to memory, time, L2 to MMA; logs: splits, steps, and m, n, k. What is
// asked for: the kernels in their order, with logarithms of their times, split_k, and whether they are likely.
// loads: as KernelColumns.loads says.
struct scratch {
    float *splits, *features, *logs, *found, *keys, *columns, *sums, *times;
    double *raw;
    uint8_t *likely, *suits;
    int64_t *kept, *kernels, *parts;
    const double *loads;
};

struct trees {
    int64_t depth, count;
    const int32_t *asked;  // by tree and question
    const float *limits;   // likewise
    const float *leaves;   // by tree and answers
};

// Constants of torch_mm.py: tiles as pairs of rows and columns.
struct library {
    int64_t count;
    const int64_t *tiles;
    double bytes_us, flops_us, start_us, most_waves, base;
};

// few_rows.py: what it believes of a GPU, in the order of _FewRows of native_model.py, and of one kernel.
struct few_rows {
    double start_us, cta_us, round_clk, load_clk, row_clk, share_clk, tail, cluster_us, pdl_us, latency_us, overlap,
        bytes_us, sm_bytes_us, mhz, base;
    int64_t sms, registers, threads, ctas, load_bytes, elements, address;
};
struct cuts {
    int64_t rows, threads, columns, warps_along_k, unroll, cluster, registers, overlaps;
};

// wave_order.py: GPCs, the one that is full first with its multiprocessors, and groups of two multiprocessors.
enum { GPCS = 8, SMALL = 1, SMALL_SMS = 8, PAIRS = 4, MOST_PLACES = 4096, WORDS = MOST_PLACES / 64,
       MOST_ORDERS = 62 };

static inline double smaller(double x, double y) { return x < y ? x : y; }
static inline double larger(double x, double y) { return x > y ? x : y; }
static inline int64_t smaller_of(int64_t x, int64_t y) { return x < y ? x : y; }

// memory_us: bytes are added up as Python does it, exactly.
static double memory_us(const struct kernels *c, __int128 m, __int128 n, __int128 k, __int128 batch) {
    const __int128 bytes = batch * ((m + n) * k * (int64_t)c->in_bytes + m * n * (int64_t)c->out_bytes);
    return (double)bytes / c->memory_bytes_us;
}

// KernelSet._splits and rooflines, without logarithms. `swapped`: whether swapped kernels are likely.
EXPORT WIDE void describe(const struct kernels *c, const struct scratch *s, int64_t of_m, int64_t of_n, int64_t of_k,
                          int64_t of_batch, int32_t swapped) {
    const int64_t count = c->count;
    const double m = (double)of_m, n = (double)of_n, batch = (double)of_batch;
    const double memory = memory_us(c, of_m, of_n, of_k, of_batch);
    const float k = (float)of_k;
    for (int64_t at = 0; at < count; at++) {
        const double rows = c->swap_ab[at] ? n : m, columns = c->swap_ab[at] ? m : n;
        const double clusters_m = ceil(rows / c->sides[at]), clusters_n = ceil(columns / c->sides[count + at]);
        const double total = clusters_m * clusters_n * batch;
        int likely = rows > c->least[at] && columns > c->least[count + at];
        likely &= swapped || !c->swap_ab[at];
        float split = 1.0f;
        if (at >= c->whole) {
            const float enough = floorf(k / c->part[at - c->whole]);
            const float most = c->most_split < enough ? c->most_split : enough;
            const double filling = larger(floor(c->filling[at - c->whole] / total), 2.0);
            split = (float)smaller(filling, most > 2.0f ? most : 2.0f);
            likely &= most >= 2.0f && total * c->blocks[at] <= c->split_tiles;
        }
        s->splits[at] = split;
        s->likely[at] = (uint8_t)likely;
        const double parts = split, units = total * parts, rounds = units / c->resident[at];
        const double waves = ceil(rounds);
        const float steps = ceilf(k / c->tile_k[at] / split);
        const double busy = smaller(units, c->resident[at]) * c->blocks[at];
        const double inside_m = smaller(c->tiles[at], rows), inside_n = smaller(c->tiles[count + at], columns);
        double l2_us = inside_m * s->loads[at] + inside_n * s->loads[count + at];
        l2_us /= smaller(c->l2_us_sm, c->l2_us / busy);
        const double main_us = (double)steps * larger(c->inner_us[at], l2_us);
        double epilogue = waves * c->epilogue_us[at];
        if (c->pingpong[at]) {
            const double turns = larger((c->epilogue_us[at] - main_us) * 0.5, 0.0) * waves;
            epilogue = (waves <= 1.0 ? 0.0 : turns) + c->epilogue_us[at];
        }
        const double compute = waves * main_us + epilogue;
        const double reduce = parts <= 1.0 ? 0.0 : units * c->sum_us[at] + c->reduce_us;
        const double time = c->fixed_us + reduce + larger(compute, memory);
        s->raw[at] = rounds;
        s->raw[count + at] = compute / memory;
        s->raw[2 * count + at] = time;
        s->raw[3 * count + at] = l2_us / c->mma_us[at];
        s->logs[at] = split;
        s->logs[count + at] = steps;
#define PUT(row, value) s->features[c->rows[row] * c->stride + at] = (float)(value)
        PUT(LAST_WAVE, rounds / waves);
        PUT(REDUCE, reduce / time);
        PUT(EPILOGUE, epilogue / time);
        PUT(CLUSTERS_N, smaller(clusters_n, c->most_clusters));
        PUT(INSIDE_M, inside_m / c->tiles[at]);
        PUT(INSIDE_N, inside_n / c->tiles[count + at]);
        PUT(BUSY, busy / c->sms);
        PUT(WAVES, smaller(waves, c->most_waves));
    }
    s->logs[2 * count] = (float)(m * batch);
    s->logs[2 * count + 1] = (float)n;
    s->logs[2 * count + 2] = k;
}

// One value for each of LANES columns, which the compiler keeps in a register where there are such.
typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t integers __attribute__((vector_size(4 * LANES)));

// What sum_trees does, by the compiler's vectors.
static WIDE void sum_trees_plainly(const struct trees *trees, int64_t first, int64_t last, const float *features,
                                   int64_t stride, float *sums) {
    const int64_t width = (int64_t)1 << trees->depth;
    for (int64_t at = 0; at < stride; at += LANES) {
        const float *leaves = trees->leaves + first * width;
        floats found = {0};
        for (int64_t tree = first; tree < last; tree++, leaves += width) {
            integers numbers = {0}, yes = numbers + 1;
            for (int64_t question = 0; question < trees->depth; question++, yes += yes) {
                const int64_t place = tree * trees->depth + question;
                const floats values = *(const floats *)(features + trees->asked[place] * stride + at);
                numbers |= (integers)(values > trees->limits[place]) & yes;
            }
            floats added;
            for (int lane = 0; lane < LANES; lane++) added[lane] = leaves[numbers[lane]];
            found += added;
        }
        *(floats *)(sums + at) = found;
    }
}

#ifdef GATHERS
// The same with one instruction that reads the leaves of LANES columns, for so many groups of columns at once:
// these share what is read of a tree. Trees are asked for some time before they are looked at, since a first call
// finds them in no near cache.
static inline __attribute__((always_inline, target("avx2"))) void gather_leaves(
    int64_t depth, int groups, const struct trees *trees, int64_t first, int64_t last, const float *features,
    int64_t stride, float *sums) {
    const int32_t *asked = trees->asked + first * depth;
    const float *limits = trees->limits + first * depth, *leaves = trees->leaves + (first << depth);
    __m256 found[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t tree = first; tree < last; tree++, asked += depth, limits += depth, leaves += (int64_t)1 << depth) {
        for (int64_t line = 0; line < ((int64_t)1 << depth); line += FLOATS_OF_LINE)
            _mm_prefetch((const char *)(leaves + (AHEAD << depth) + line), _MM_HINT_T0);
        __m256i numbers[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        for (int64_t question = 0; question < depth; question++) {
            const float *values = features + asked[question] * stride;
            const __m256 limit = _mm256_broadcast_ss(limits + question);
            const __m256i bit = _mm256_set1_epi32(1 << question);
            for (int group = 0; group < groups; group++) {
                const __m256 yes = _mm256_cmp_ps(_mm256_loadu_ps(values + group * LANES), limit, _CMP_GT_OQ);
                numbers[group] =
                    _mm256_or_si256(numbers[group], _mm256_and_si256(_mm256_castps_si256(yes), bit));
            }
        }
        for (int group = 0; group < groups; group++)
            found[group] = _mm256_add_ps(found[group], _mm256_i32gather_ps(leaves, numbers[group], 4));
    }
    for (int group = 0; group < groups; group++) _mm256_storeu_ps(sums + group * LANES, found[group]);
}

__attribute__((target("avx2"))) static void sum_trees_by_gathers(
    const struct trees *trees, int64_t first, int64_t last, const float *features, int64_t stride, float *sums) {
    const int usual = trees->depth == DEPTH;  // known to the compiler, which unrolls the questions
    int64_t at = 0;
    for (; at + 2 * LANES <= stride; at += 2 * LANES)
        if (usual) gather_leaves(DEPTH, 2, trees, first, last, features + at, stride, sums + at);
        else gather_leaves(trees->depth, 2, trees, first, last, features + at, stride, sums + at);
    if (at < stride) gather_leaves(trees->depth, 1, trees, first, last, features + at, stride, sums + at);
}
#endif

// The sum of trees first to last for each column of features. Rows are padded to whole LANES.
static void sum_trees(const struct trees *trees, int64_t first, int64_t last, const float *features,
                      int64_t stride, float *sums) {
#ifdef GATHERS
    if (__builtin_cpu_supports("avx2")) {
        sum_trees_by_gathers(trees, first, last, features, stride, sums);
        return;
    }
#endif
    sum_trees_plainly(trees, first, last, features, stride, sums);
}

// What all trees add for one column of features.
static float sum_leaves(const struct trees *trees, const float *features) {
    float found = 0.0f;
    for (int64_t tree = 0; tree < trees->count; tree++) {
        int32_t number = 0;
        for (int64_t question = 0; question < trees->depth; question++) {
            const int64_t place = tree * trees->depth + question;
            number |= (features[trees->asked[place]] > trees->limits[place]) << question;
        }
        found += trees->leaves[(tree << trees->depth) + number];
    }
    return found;
}

// torch_mm.describe, whose logarithms are those of the C library: microseconds by the roofline, times the exponential
// of what all trees and their base add. Sizes are multiplied as Python does it, exactly.
EXPORT double time_torch(const struct trees *trees, const struct library *library, int64_t m, int64_t n, int64_t k,
                         int64_t sm_count, double along_m, double along_n) {
    const __int128 rows = m, columns = n, depth = k;
    const double memory = (double)(2 * (rows * depth + depth * columns + rows * columns)) / library->bytes_us;
    const double math = (double)(2 * rows * columns * depth) / library->flops_us;
    float features[MOST_FEATURES] = {
        (float)log((double)m), (float)log((double)n), (float)log((double)k), (float)log((double)(rows * columns)),
        (float)log((double)(rows * columns * depth)), (float)log(math / memory), (float)log(memory)};
    float *next = features + 7;
    for (int64_t tile = 0; tile < library->count; tile++) {
        const double high = ceil((double)m / (double)library->tiles[2 * tile]);
        const double rounds = high * ceil((double)n / (double)library->tiles[2 * tile + 1]) / (double)sm_count;
        const double waves = ceil(rounds);
        *next++ = (float)log(rounds);
        *next++ = (float)(rounds / waves);
        *next++ = (float)smaller(waves, library->most_waves);
    }
    *next++ = (float)along_m;
    *next++ = (float)along_n;
    return (library->start_us + larger(memory, math)) * exp((double)sum_leaves(trees, features) + library->base);
}

static inline int64_t up(int64_t x, int64_t y) { return (x - 1) / y + 1; }

// FewRowsEstimator.times_us: operations come in its order. `vectors`: loads of a row of A.
EXPORT void time_few_rows(const struct few_rows *c, const struct trees *trees, const struct cuts *kernels,
                          int64_t count, int64_t m, int64_t n, int64_t batch, int64_t k, int64_t vectors, double bytes,
                          double *found) {
    enum { WARP = 32 };
    for (int64_t at = 0; at < count; at++) {
        const struct cuts *cut = kernels + at;
        const int64_t groups = cut->threads / WARP / cut->warps_along_k;
        const int64_t of_cta = (groups > 1 ? groups : 1) * cut->columns;  // 0 breaks a rule, and divides
        const int64_t ctas = up(n, of_cta) * cut->cluster * batch;
        const int64_t room = c->registers / (up(cut->registers, 8) * 8 * cut->threads);
        const int64_t fitting = smaller_of(smaller_of(room, c->threads / cut->threads), c->ctas);
        const int64_t resident = fitting > 1 ? fitting : 1, busiest = up(ctas, c->sms), waves = up(busiest, resident);
        const int64_t loads = up(vectors, WARP * cut->warps_along_k * cut->cluster);
        const int64_t unroll = smaller_of(cut->unroll, loads), rounds = up(loads, unroll);

        const int64_t per_load = cut->columns * c->elements * (1 + cut->rows) + (c->elements + c->address) * cut->rows;
        const double products = (double)(unroll * per_load) * c->round_clk / c->mhz;
        const double cta = (double)rounds * (c->latency_us + products) + c->cta_us;
        const double of_sm = (double)(busiest * of_cta) / (double)cut->cluster * (double)vectors;
        const double clocks = c->load_clk + (double)cut->rows * (c->row_clk + c->share_clk / (double)cut->columns);
        double busy = pow(bytes / c->bytes_us, c->overlap);
        busy += pow(of_sm * (double)c->load_bytes / c->sm_bytes_us, c->overlap);
        busy += pow((double)waves * cta, c->overlap);
        busy += pow(of_sm / (double)WARP * clocks / c->mhz, c->overlap);
        double rough = c->start_us + c->pdl_us + pow(busy, 1.0 / c->overlap) + c->tail * cta;
        rough += cut->cluster != 1 ? c->cluster_us : 0.0;
        rough -= cut->overlaps ? c->pdl_us : 0.0;

        const double per_sm = (double)ctas / (double)c->sms, shares = (double)busiest / (double)resident;
        const double turns = larger(1.0, shares);
        const float features[MOST_FEATURES] = {
            (float)m, (float)(n * batch), (float)k, (float)bytes, (float)cut->rows, (float)cut->threads,
            (float)cut->columns, (float)cut->warps_along_k, (float)unroll, (float)of_cta, (float)per_sm,
            (float)((double)busiest / per_sm), (float)resident, (float)turns, (float)((double)waves / turns),
            (float)rounds, (float)((double)loads / (double)(rounds * unroll))};
        found[at] = rough * exp((double)sum_leaves(trees, features) + c->base);
    }
}

// Puts logarithms into the features and finds the most kernels that the first trees put first, likely ones
// before others; puts them in the order of all trees. Equals stay in the order of the kernels.
EXPORT void rank(const struct kernels *c, const struct trees *trees, int64_t first, int64_t most,
                 const struct scratch *s) {
    const int64_t count = c->count;
    for (int64_t at = 0; at < count; at++) {
        PUT(WAVES_LOG, s->raw[at]);
        PUT(TO_MEMORY, s->raw[count + at]);
        PUT(TIME, s->raw[2 * count + at]);
        PUT(L2, s->raw[3 * count + at]);
        PUT(SPLIT, s->logs[at]);
        PUT(STEPS, s->logs[count + at]);
        PUT(M, s->logs[2 * count]);
        PUT(N, s->logs[2 * count + 1]);
        PUT(K, s->logs[2 * count + 2]);
    }
    sum_trees(trees, 0, first, s->features, c->stride, s->found);
    const float *time = s->features + c->rows[TIME] * c->stride;
    for (int64_t at = 0; at < count; at++) {
        s->found[at] = time[at] + s->found[at];
        s->keys[at] = s->found[at] + (s->likely[at] ? 0.0f : c->last);
    }
    for (int64_t place = 0; place < most; place++) {
        int64_t best = -1;
        for (int64_t at = 0; at < count; at++)
            if (s->keys[at] < INFINITY && (best < 0 || s->keys[at] < s->keys[best])) best = at;
        best = best < 0 ? 0 : best;  // times are finite; whatever a fit says, nothing beyond the arrays is read
        s->kept[place] = best;
        s->keys[best] = INFINITY;
    }
    const int64_t stride = (most + LANES - 1) / LANES * LANES;
    for (int64_t row = 0; row < c->features; row++)
        for (int64_t at = 0; at < most; at++)
            s->columns[row * stride + at] = s->features[row * c->stride + s->kept[at]];
    sum_trees(trees, first, trees->count, s->columns, stride, s->sums);
    for (int64_t at = 0; at < most; at++) {
        const int64_t place = s->kept[at];
        const float value = s->found[place] + s->sums[at];
        const float key = value + (s->likely[place] ? 0.0f : c->last);
        int64_t before = at;
        for (; before > 0 && s->keys[before - 1] > key; before--) {
            s->keys[before] = s->keys[before - 1];
            s->times[before] = s->times[before - 1];
            s->kernels[before] = s->kernels[before - 1];
        }
        s->keys[before] = key;
        s->times[before] = value;
        s->kernels[before] = place;
    }
    for (int64_t at = 0; at < most; at++) {
        s->parts[at] = (int64_t)s->splits[s->kernels[at]];
        s->suits[at] = s->likely[s->kernels[at]];
    }
}

static inline int64_t mark(uint64_t *seen, int64_t number) {
    uint64_t *word = seen + number / 64, bit = (uint64_t)1 << number % 64;
    const int64_t is_new = !(*word & bit);
    *word |= bit;
    return is_new;
}

// Work units of the groups of two multiprocessors; the first ones of the GPCs, and where those of the last end.
static int64_t units_of_gpcs(int64_t units, int64_t blocks, int64_t *bounds) {
    const int64_t rounds = blocks == 1 ? 2 : blocks == 2, full = SMALL_SMS / blocks;
    const int64_t apart = rounds * (PAIRS + GPCS), late = apart + (full - rounds) * GPCS;
    int64_t counts[GPCS] = {0}, alone = 0;
    for (int64_t cluster = 0; cluster < units; cluster++) {
        int64_t turn;
        if (cluster < apart) turn = cluster % (PAIRS + GPCS) - PAIRS;
        else if (cluster < late) turn = (cluster - apart) % GPCS;
        else {
            turn = (cluster - late) % (GPCS - 1);
            turn += turn >= SMALL;
        }
        if (turn < 0) alone++;
        else counts[turn]++;
    }
    bounds[0] = alone;
    for (int64_t gpc = 0; gpc < GPCS; gpc++) bounds[gpc + 1] = bounds[gpc] + counts[gpc];
    return alone;
}

// The place of what wave_order.least_loads returns, of the orders whose bits are `asked` for, with at most MOST_PLACES
// clusters along each side, parts included; orders are pairs of swizzle_size and raster_along_m.
EXPORT int64_t least_loads(int64_t clusters_m, int64_t clusters_n, int64_t parts, int64_t blocks, int64_t rows,
                           int64_t columns, int64_t resident, const int64_t *orders, int64_t count, int64_t asked) {
    int64_t best = 0, least = INT64_MAX, bounds[GPCS + 1];
    while (!(asked >> best & 1)) best++;
    if (clusters_m == 1 || clusters_n == 1) return best;
    const int64_t units = smaller_of(clusters_m * clusters_n * parts, resident);
    const int64_t alone = units_of_gpcs(units, blocks, bounds);
    for (int64_t order = best; order < count; order++) {
        if (!(asked >> order & 1)) continue;
        const int64_t along_m = orders[2 * order + 1];
        const int64_t major = along_m ? clusters_m : clusters_n, minor = along_m ? clusters_n : clusters_m;
        const int64_t of_major = along_m ? rows : columns, of_minor = along_m ? columns : rows;
        const int64_t band = smaller_of(orders[2 * order], minor);
        const int64_t majors = (parts * major + 63) / 64, minors = (parts * minor + 63) / 64;
        uint64_t seen_major[WORDS], seen_minor[WORDS];
        int64_t loads = alone * (rows + columns), unit = 0, gpc = 0;
        for (int64_t part = 0; part < parts; part++)
            for (int64_t start = 0; start < minor; start += band)
                for (int64_t at = 0; at < major; at++)
                    for (int64_t next = start; next < smaller_of(start + band, minor); next++, unit++) {
                        if (unit == units) goto counted;
                        if (unit < alone) continue;
                        if (unit == bounds[gpc]) {
                            while (gpc < GPCS && unit == bounds[gpc]) gpc++;
                            for (int64_t word = 0; word < majors; word++) seen_major[word] = 0;
                            for (int64_t word = 0; word < minors; word++) seen_minor[word] = 0;
                        }
                        loads += of_major * mark(seen_major, part * major + at);
                        loads += of_minor * mark(seen_minor, part * minor + next);
                    }
    counted:
        if (loads < least) {
            least = loads;
            best = order;
        }
    }
    return best;
}

// traffic._loads: the bytes of one operand for a patch.
static inline double operand_bytes(double extent, double rounds, double patch, double line, double batch,
                                   const struct kernels *c) {
    const double once = extent * line;
    const double lost = smaller(1.0, larger(0.0, (once / c->l2_bytes - c->kept) / 0.5));
    if (lost == 0.0) return batch * once;
    return batch * (once + larger(0.0, rounds * smaller(patch, extent) * line - once) * lost);
}

// traffic.Tiling.cheapest: the bits of the orders that cause hardly more traffic than the best.
static int64_t cheapest(const struct kernels *c, double rows, double columns, double batch, double k,
                        double side_m, double side_n, double resident, const int64_t *orders, int64_t count) {
    const double clusters_m = ceil(rows / side_m), clusters_n = ceil(columns / side_n), line = k * c->in_bytes;
    const double out_bytes = rows * columns * batch * c->out_bytes, tiles = clusters_m * clusters_n;
    const double together = smaller(resident, tiles), rounds = tiles / together;
    double bytes[MOST_ORDERS], least = INFINITY;
    for (int64_t order = 0; order < count; order++) {
        const int along_m = orders[2 * order + 1] != 0;
        const double major = along_m ? clusters_m : clusters_n, minor = along_m ? clusters_n : clusters_m;
        const double band = smaller((double)orders[2 * order], minor), deep = smaller(major, together / band);
        const double wide = smaller(minor, larger(band, together / major));
        const double patch_m = (along_m ? deep : wide) * side_m, patch_n = (along_m ? wide : deep) * side_n;
        bytes[order] = operand_bytes(rows, rounds, patch_m, line, batch, c) +
                       operand_bytes(columns, rounds, patch_n, line, batch, c) + out_bytes;
        least = smaller(least, bytes[order]);
    }
    int64_t found = 0;
    for (int64_t order = 0; order < count; order++)
        if (bytes[order] <= least * c->near) found |= (int64_t)1 << order;
    return found;
}

// The place of what traffic.Tiling.best_order returns of `count` orders, with k in so many parts; -1 where these, or
// the clusters along a side, are more than are counted. `turns`: whether it is known how GPCs take turns.
EXPORT int64_t best_order(const struct kernels *c, int64_t at, int64_t parts, int64_t m, int64_t n, int64_t k,
                          int64_t batch, const int64_t *orders, int64_t count, int32_t turns) {
    const int64_t rows = c->swap_ab[at] ? n : m, columns = c->swap_ab[at] ? m : n;
    const int64_t side_m = (int64_t)c->sides[at], side_n = (int64_t)c->sides[c->count + at];
    const int64_t clusters_m = (rows - 1) / side_m + 1, clusters_n = (columns - 1) / side_n + 1;
    const int64_t resident = (int64_t)c->resident[at], all = parts * batch;
    if (count > MOST_ORDERS) return -1;
    int64_t asked = ((int64_t)1 << count) - 1, best = 0;
    if (clusters_m * clusters_n * all > resident)
        asked = cheapest(c, (double)rows, (double)columns, (double)batch, (double)k, (double)side_m, (double)side_n,
                         (double)resident, orders, count);
    while (!(asked >> best & 1)) best++;
    if (!turns) return best;
    if ((clusters_m > clusters_n ? clusters_m : clusters_n) * all > MOST_PLACES) return -1;
    return least_loads(clusters_m, clusters_n, all, (int64_t)c->blocks[at], side_m, side_n, resident, orders, count,
                       asked);
}
