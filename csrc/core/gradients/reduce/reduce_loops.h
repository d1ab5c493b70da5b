/* reduce_loops: arithmetic of sums, of dst += scale * src, of scaling and of norms, in
 * vectors of any width.
 *
 * Private to reduce_avx2.c, reduce_avx512.c and reduce_neon.c, which include one of the
 * headers of simd/ first. Of its types, `floats` is a register of FLOATS float32 numbers,
 * and `doubles` one of DOUBLES float64 numbers. Addresses need no alignment. The last
 * items that do not fill a register are handled by the scalar kernels.
 */
#ifndef MLS_REDUCE_LOOPS_H
#define MLS_REDUCE_LOOPS_H

enum {
    AHEAD = 2048, /* bytes to prefetch ahead: bfloat16 gains a quarter */
    PAGE = 4096,  /* hardware prefetchers stop at page ends */
    TOGETHER = 4, /* registers in flight, so that no sum waits for another */
    SQUARES = MLS_SQUARE_LANES / DOUBLES /* registers that hold the lanes of a block */
};

/* Types of the functions of simd/ for items of dtype X: floats_X and doubles_X load a
 * register of items, store_X rounds floats to items, and kept_X returns the floats that a
 * store and a load would give. Arguments are always constants and callees are inlined, so
 * no pointer remains in the machine code. */
typedef floats (*floats_function)(const unsigned char *items);
typedef void (*store_function)(unsigned char *items, floats values);
typedef floats (*kept_function)(floats values);
typedef doubles (*doubles_function)(const unsigned char *items);

/* The counterpart of kept_f16: nothing is rounded. */
MLS_INLINED floats kept_f32(floats values)
{
    return values;
}

/* Prefetches `bytes` bytes; may run past the end (prefetching never faults). */
MLS_INLINED void prefetch_bytes(const void *address, size_t bytes)
{
    MLS_UNROLLED
    for (size_t line = 0; line < bytes; line += 64) {
        __builtin_prefetch((const void *)((uintptr_t)address + line));
    }
}

/* Prefetches the items of a later step, while this step reads `bytes` bytes at
 * `address`: AHEAD bytes further line by line. With `by_page`, the processor prefetches
 * well within a page (mls_cpu_follows_runs), so only the first line of the next page is
 * prefetched, once in each page. */
MLS_INLINED void prefetch_ahead(const void *address, size_t bytes, bool by_page)
{
    if (!by_page) {
        prefetch_bytes((const void *)((uintptr_t)address + AHEAD), bytes);
    } else if ((uintptr_t)address % PAGE < bytes) {
        prefetch_bytes((const void *)((uintptr_t)address + PAGE), 1);
    }
}

/* ---- sums ---- */

/* Sets the TOGETHER registers `sum` to the sums of the items at byte `at` of `count`
 * sources, in the order of the sources. `load` converts items of `bytes` bytes to floats;
 * `by_page` as in prefetch_ahead. */
MLS_INLINED void sum_registers(floats *sum, const void *const *sources, size_t count,
                               size_t at, size_t bytes, bool by_page,
                               floats_function load)
{
    const unsigned char *first = sources[0];
    prefetch_ahead(first + at, (size_t)TOGETHER * FLOATS * bytes, by_page);
    MLS_UNROLLED
    for (size_t k = 0; k < TOGETHER; k++) {
        sum[k] = load(first + at + k * FLOATS * bytes);
    }
    for (size_t s = 1; s < count; s++) {
        const unsigned char *next = sources[s];
        prefetch_ahead(next + at, (size_t)TOGETHER * FLOATS * bytes, by_page);
        MLS_UNROLLED
        for (size_t k = 0; k < TOGETHER; k++) {
            sum[k] = sum[k] + load(next + at + k * FLOATS * bytes);
        }
    }
}

/* Sums items `start` to before `end` of `count` sources, and divides by `divisor` if
 * `divides`; only whole steps of TOGETHER registers. Returns the first item that is left.
 * `load` reads items of `from_bytes` bytes, `store` writes items of `to_bytes` bytes.
 * `count` and `divides` are constants. */
MLS_INLINED size_t sum_steps(unsigned char *out, const void *const *sources, size_t count,
                             size_t start, size_t end, float divisor, bool divides,
                             size_t from_bytes, size_t to_bytes, floats_function load,
                             store_function store)
{
    const floats by = repeat(divisor);
    const bool by_page = mls_cpu_follows_runs();
    size_t i = start;
    for (; end - i >= (size_t)TOGETHER * FLOATS; i += (size_t)TOGETHER * FLOATS) {
        floats sum[TOGETHER];
        sum_registers(sum, sources, count, i * from_bytes, from_bytes, by_page, load);
        MLS_UNROLLED
        for (size_t k = 0; k < TOGETHER; k++) {
            if (divides) {
                sum[k] = sum[k] / by;
            }
            store(out + (i + k * FLOATS) * to_bytes, sum[k]);
        }
    }
    return i;
}

/* Sums items `start` .. `start + n - 1` of `count` sources into `out`, and divides by
 * `divisor`. `load` reads items of `from_bytes` bytes, `store` writes items of `to_bytes`
 * bytes. Two sources, the usual number, have their own loop. The kernel `scalar` does the
 * rest below a whole step. */
MLS_INLINED void sum_run(void *out, const void *const *sources, size_t count,
                         size_t start, size_t n, double divisor, size_t from_bytes,
                         size_t to_bytes, floats_function load, store_function store,
                         mls_reduce_kernel scalar)
{
    const float by = (float)divisor;
    const size_t end = start + n;
    size_t done;
    if (by < 1 || by > 1) {
        done = sum_steps(out, sources, count, start, end, by, true, from_bytes, to_bytes,
                         load, store);
    } else if (count == 2) {
        done = sum_steps(out, sources, 2, start, end, by, false, from_bytes, to_bytes,
                         load, store);
    } else {
        done = sum_steps(out, sources, count, start, end, by, false, from_bytes, to_bytes,
                         load, store);
    }
    scalar(out, sources, count, done, end - done, divisor);
}

/* Defines the sum of dtype A, stored as B. */
#define MLS_DEFINE_SUM(name, A, B, from_bytes, to_bytes, table)                          \
    MLS_TARGET static void name(void *out, const void *const *sources, size_t count,     \
                                size_t start, size_t n, double divisor)                  \
    {                                                                                    \
        sum_run(out, sources, count, start, n, divisor, from_bytes, to_bytes,            \
                floats_##A, store_##B, mls_reduce_scalar.table);                         \
    }

MLS_DEFINE_SUM(sum_f16, f16, f16, 2, 2, same[MLS_REDUCE_SUM][MLS_F16])
MLS_DEFINE_SUM(sum_bf16, bf16, bf16, 2, 2, same[MLS_REDUCE_SUM][MLS_BF16])
#if !defined(MLS_SUM_F32) /* the including file may use a sum of another width */
MLS_DEFINE_SUM(sum_f32, f32, f32, 4, 4, same[MLS_REDUCE_SUM][MLS_F32])
#    define MLS_SUM_F32 sum_f32
#endif
MLS_DEFINE_SUM(sum_wide_f16, f16, f32, 2, 4, wide[MLS_REDUCE_SUM][MLS_F16])
MLS_DEFINE_SUM(sum_wide_bf16, bf16, f32, 2, 4, wide[MLS_REDUCE_SUM][MLS_BF16])

/* Sums items `start` .. `start + n - 1` of `count` float64 sources into `out`, and
 * divides by `divisor`. One register at a time: memory is the bottleneck. */
MLS_TARGET static void sum_f64(void *out, const void *const *sources, size_t count,
                               size_t start, size_t n, double divisor)
{
    const size_t end = start + n;
    const doubles by = repeat_f64(divisor);
    size_t i = start;
    for (; end - i >= DOUBLES; i += DOUBLES) {
        doubles sum = doubles_f64((const unsigned char *)sources[0] + i * 8);
        for (size_t s = 1; s < count; s++) {
            sum = sum + doubles_f64((const unsigned char *)sources[s] + i * 8);
        }
        store_f64((unsigned char *)out + i * 8, sum / by);
    }
    mls_reduce_scalar.same[MLS_REDUCE_SUM][MLS_F64](out, sources, count, i, end - i,
                                                    divisor);
}

/* ---- dst += scale * src ---- */

/* Adds scale * src to dst in whole steps of TOGETHER registers, and returns the number of
 * items done, at most n. `load_dst` and `store` convert items of `to_bytes` bytes,
 * `load_src` items of `from_bytes` bytes. Product and sum are rounded separately: the
 * build forbids contraction. */
MLS_INLINED size_t add_steps(unsigned char *dst, const unsigned char *src, size_t n,
                             float scale, size_t to_bytes, size_t from_bytes,
                             floats_function load_dst, floats_function load_src,
                             store_function store)
{
    const floats times = repeat(scale);
    const bool by_page = mls_cpu_follows_runs();
    size_t i = 0;
    for (; n - i >= (size_t)TOGETHER * FLOATS; i += (size_t)TOGETHER * FLOATS) {
        floats sum[TOGETHER];
        prefetch_ahead(dst + i * to_bytes, (size_t)TOGETHER * FLOATS * to_bytes, by_page);
        prefetch_ahead(src + i * from_bytes, (size_t)TOGETHER * FLOATS * from_bytes,
                       by_page);
        MLS_UNROLLED
        for (size_t k = 0; k < TOGETHER; k++) {
            const size_t at = i + k * FLOATS;
            const floats product = times * load_src(src + at * from_bytes);
            sum[k] = load_dst(dst + at * to_bytes) + product;
        }
        MLS_UNROLLED
        for (size_t k = 0; k < TOGETHER; k++) {
            store(dst + (i + k * FLOATS) * to_bytes, sum[k]);
        }
    }
    return i;
}

/* Adds scale * src to dst like add_steps, and returns the number of items done. Both have
 * bfloat16, a full register of items at a time: one shift or mask turns each half of a
 * pair into a float, so no widening is needed. */
MLS_INLINED size_t add_pairs(unsigned char *dst, const unsigned char *src, size_t n,
                             float scale)
{
    const floats times = repeat(scale);
    const bool by_page = mls_cpu_follows_runs();
    const size_t step = (size_t)TOGETHER * FLOATS;
    size_t i = 0;
    for (; n - i >= step; i += step) {
        floats sum[TOGETHER / 2];
        prefetch_ahead(dst + i * 2, step * 2, by_page);
        prefetch_ahead(src + i * 2, step * 2, by_page);
        MLS_UNROLLED
        for (size_t k = 0; k < TOGETHER / 2; k++) {
            const floats to = floats_f32(dst + i * 2 + k * WIDTH);
            const floats from = floats_f32(src + i * 2 + k * WIDTH);
            const floats even = times * even_bf16(from), odd = times * odd_bf16(from);
            sum[k] = join_bf16(even_bf16(to) + even, odd_bf16(to) + odd);
        }
        MLS_UNROLLED
        for (size_t k = 0; k < TOGETHER / 2; k++) {
            store_f32(dst + i * 2 + k * WIDTH, sum[k]);
        }
    }
    return i;
}

/* Adds bfloat16 to bfloat16. */
MLS_TARGET static void add_bf16_bf16(void *dst, const void *src, size_t n, double scale)
{
    const size_t done = add_pairs(dst, src, n, (float)scale);
    mls_reduce_scalar.add[MLS_BF16][MLS_BF16]((unsigned char *)dst + done * 2,
                                              (const unsigned char *)src + done * 2,
                                              n - done, scale);
}

/* Defines the addition of B to A. */
#define MLS_DEFINE_ADD(A, B, to_bytes, from_bytes, dst_dtype, src_dtype)                 \
    MLS_TARGET static void add_##A##_##B(void *dst, const void *src, size_t n,           \
                                         double scale)                                   \
    {                                                                                    \
        const size_t done = add_steps(dst, src, n, (float)scale, to_bytes, from_bytes,   \
                                      floats_##A, floats_##B, store_##A);                \
        mls_reduce_scalar.add[dst_dtype][src_dtype](                                     \
            (unsigned char *)dst + done * (to_bytes),                                    \
            (const unsigned char *)src + done * (from_bytes), n - done, scale);          \
    }

MLS_DEFINE_ADD(f16, f16, 2, 2, MLS_F16, MLS_F16)
MLS_DEFINE_ADD(f16, bf16, 2, 2, MLS_F16, MLS_BF16)
MLS_DEFINE_ADD(f16, f32, 2, 4, MLS_F16, MLS_F32)
MLS_DEFINE_ADD(bf16, f16, 2, 2, MLS_BF16, MLS_F16)
MLS_DEFINE_ADD(bf16, f32, 2, 4, MLS_BF16, MLS_F32)
MLS_DEFINE_ADD(f32, f16, 4, 2, MLS_F32, MLS_F16)
MLS_DEFINE_ADD(f32, bf16, 4, 2, MLS_F32, MLS_BF16)
MLS_DEFINE_ADD(f32, f32, 4, 4, MLS_F32, MLS_F32)

/* Adds scale * src to dst for n items of float64, one register at a time, like
 * sum_f64. */
MLS_TARGET static void add_f64_f64(void *dst, const void *src, size_t n, double scale)
{
    unsigned char *to = dst;
    const unsigned char *from = src;
    const doubles times = repeat_f64(scale);
    for (; n >= DOUBLES; n -= DOUBLES) {
        const doubles product = times * doubles_f64(from);
        store_f64(to, doubles_f64(to) + product);
        to += WIDTH, from += WIDTH;
    }
    mls_reduce_scalar.add[MLS_F64][MLS_F64](to, from, n, scale);
}

/* ---- items *= factor ---- */

/* One register at a time. */
#define MLS_DEFINE_SCALE(A, bytes, dtype)                                                \
    MLS_TARGET static void scale_##A(void *items, size_t n, double factor)               \
    {                                                                                    \
        unsigned char *at = items;                                                       \
        const floats times = repeat((float)factor);                                      \
        for (; n >= FLOATS; n -= FLOATS, at += FLOATS * (bytes)) {                       \
            store_##A(at, floats_##A(at) * times);                                       \
        }                                                                                \
        mls_reduce_scalar.scale[dtype](at, n, factor);                                   \
    }

MLS_DEFINE_SCALE(f16, 2, MLS_F16)
MLS_DEFINE_SCALE(bf16, 2, MLS_BF16)
MLS_DEFINE_SCALE(f32, 4, MLS_F32)

/* Multiplies n items of float64 by the factor, in place; the scalar kernel does the rest
 * below a register. */
MLS_TARGET static void scale_f64(void *items, size_t n, double factor)
{
    unsigned char *at = items;
    const doubles times = repeat_f64(factor);
    for (; n >= DOUBLES; n -= DOUBLES, at += WIDTH) {
        store_f64(at, doubles_f64(at) * times);
    }
    mls_reduce_scalar.scale[MLS_F64](at, n, factor);
}

/* ---- norm partials: the sum of squares of a block, in MLS_SQUARE_LANES partial sums,
 * its lanes ---- */

/* Adds the squares of MLS_SQUARE_LANES items of `bytes` bytes, each to its own lane.
 * `load` converts items to doubles. */
MLS_INLINED void square_lanes(doubles *lanes, const unsigned char *items, size_t bytes,
                              doubles_function load)
{
    MLS_UNROLLED
    for (size_t k = 0; k < SQUARES; k++) {
        const doubles x = load(items + k * DOUBLES * bytes);
        lanes[k] = lanes[k] + x * x;
    }
}

/* Adds the squares of n items of `bytes` bytes each to the lanes; `load` converts items
 * to doubles. Zeros fill the last step; they change no lane. */
MLS_INLINED void square_items(doubles *lanes, const unsigned char *items, size_t n,
                              size_t bytes, doubles_function load)
{
    unsigned char rest[MLS_SQUARE_LANES * 8] = {0};
    for (; n >= MLS_SQUARE_LANES; n -= MLS_SQUARE_LANES) {
        /* the same items of the next block */
        prefetch_bytes(items + MLS_NORM_BLOCK * bytes, MLS_SQUARE_LANES * bytes);
        square_lanes(lanes, items, bytes, load);
        items += MLS_SQUARE_LANES * bytes;
    }
    memcpy(rest, items, n * bytes);
    square_lanes(lanes, rest, bytes, load);
}

/* Sets all lanes of a block to 0. */
MLS_INLINED void clear_lanes(doubles *lanes)
{
    MLS_UNROLLED
    for (size_t k = 0; k < SQUARES; k++) {
        lanes[k] = repeat_f64(0);
    }
}

/* Returns the sum of all lanes, added in the order that defines the bits of a norm
 * partial. */
MLS_INLINED double fold_lanes(const doubles *lanes)
{
    double sums[MLS_SQUARE_LANES];
    MLS_UNROLLED
    for (size_t k = 0; k < SQUARES; k++) {
        store_f64((unsigned char *)(sums + k * DOUBLES), lanes[k]);
    }
    return mls_fold_squares(sums);
}

/* Returns the sum of squares of n items of `bytes` bytes, at most a block; the next block
 * is prefetched meanwhile. */
MLS_INLINED double squares_run(const unsigned char *items, size_t n, size_t bytes,
                               doubles_function load)
{
    doubles lanes[SQUARES];
    clear_lanes(lanes);
    square_items(lanes, items, n, bytes, load);
    return fold_lanes(lanes);
}

/* Defines the sum of squares of A. */
#define MLS_DEFINE_SQUARES(A, bytes)                                                     \
    MLS_TARGET static double squares_##A(const void *items, size_t n)                    \
    {                                                                                    \
        return squares_run(items, n, bytes, doubles_##A);                                \
    }

MLS_DEFINE_SQUARES(f16, 2)
MLS_DEFINE_SQUARES(bf16, 2)
MLS_DEFINE_SQUARES(f32, 4)
MLS_DEFINE_SQUARES(f64, 8)

/* ---- sums with their squares ---- */

enum { SQUARED_STEP = 2 * MLS_SQUARE_LANES }; /* items of a step that sums and squares */

/* Sums TOGETHER registers of items of `count` sources, from item `at` on, divides by `by`
 * if `divides`, stores them, and adds the squares of the stored values to the lanes. The
 * stored values are not read back, since loading a part of a recent store is slow:
 * `read_back` rounds the sum as `store` does. `first` is the lane of the first item, a
 * constant. Other parameters as in sum_steps. */
MLS_INLINED void sum_and_square(doubles *lanes, size_t first, unsigned char *out,
                                const void *const *sources, size_t count, size_t at,
                                floats by, bool divides, size_t from_bytes,
                                size_t to_bytes, floats_function load,
                                store_function store, kept_function read_back)
{
    floats sum[TOGETHER];
    sum_registers(sum, sources, count, at * from_bytes, from_bytes, false, load);
    MLS_UNROLLED
    for (size_t k = 0; k < TOGETHER; k++) {
        if (divides) {
            sum[k] = sum[k] / by;
        }
        store(out + (at + k * FLOATS) * to_bytes, sum[k]);
        const floats value = read_back(sum[k]);
        const doubles low = lower_half(value), high = upper_half(value);
        const size_t lane_register = (first + k * FLOATS) % MLS_SQUARE_LANES / DOUBLES;
        lanes[lane_register] = lanes[lane_register] + low * low;
        lanes[lane_register + 1] = lanes[lane_register + 1] + high * high;
    }
}

/* Sums and squares items `start` .. `start + n - 1`, only whole steps of SQUARED_STEP
 * items; returns the number of items done. `divisor` divides the sums if `divides`; other
 * parameters as in sum_and_square. `count` and `divides` are constants. */
MLS_INLINED size_t sum_squared_steps(doubles *lanes, unsigned char *out,
                                     const void *const *sources, size_t count,
                                     size_t start, size_t n, float divisor, bool divides,
                                     size_t from_bytes, size_t to_bytes,
                                     floats_function load, store_function store,
                                     kept_function read_back)
{
    const floats by = repeat(divisor);
    size_t done = 0;
    for (; n - done >= SQUARED_STEP; done += SQUARED_STEP) {
        MLS_UNROLLED
        for (size_t first = 0; first < SQUARED_STEP; first += (size_t)TOGETHER * FLOATS) {
            sum_and_square(lanes, first, out, sources, count, start + done + first, by,
                           divides, from_bytes, to_bytes, load, store, read_back);
        }
    }
    return done;
}

/* Sums items `start` .. `start + n - 1`, at most a block, of `count` sources into `out`,
 * divides by `divisor`, and returns the sum of squares of the results, with the same bits
 * as separate passes. `read_back` and `load_stored` give the stored values as floats and
 * as doubles; `scalar` sums the rest below a whole step. Other parameters as in sum_run.
 */
MLS_INLINED double sum_squares_run(void *out, const void *const *sources, size_t count,
                                   size_t start, size_t n, double divisor,
                                   size_t from_bytes, size_t to_bytes,
                                   floats_function load, store_function store,
                                   kept_function read_back, doubles_function load_stored,
                                   mls_reduce_kernel scalar)
{
    const float by = (float)divisor;
    const bool divides = by < 1 || by > 1;
    doubles lanes[SQUARES];
    size_t done;
    clear_lanes(lanes);
    if (divides) {
        done = sum_squared_steps(lanes, out, sources, count, start, n, by, true,
                                 from_bytes, to_bytes, load, store, read_back);
    } else if (count == 2) {
        done = sum_squared_steps(lanes, out, sources, 2, start, n, by, false, from_bytes,
                                 to_bytes, load, store, read_back);
    } else {
        done = sum_squared_steps(lanes, out, sources, count, start, n, by, false,
                                 from_bytes, to_bytes, load, store, read_back);
    }
    scalar(out, sources, count, start + done, n - done, divisor);
    square_items(lanes, (const unsigned char *)out + (start + done) * to_bytes, n - done,
                 to_bytes, load_stored);
    return fold_lanes(lanes);
}

/* Defines the sum of A stored as B, with its squares. */
#define MLS_DEFINE_SUM_SQUARES(name, A, B, from_bytes, to_bytes, table)                  \
    MLS_TARGET static double name(void *out, const void *const *sources, size_t count,   \
                                  size_t start, size_t n, double divisor)                \
    {                                                                                    \
        return sum_squares_run(out, sources, count, start, n, divisor, from_bytes,       \
                               to_bytes, floats_##A, store_##B, kept_##B, doubles_##B,   \
                               mls_reduce_scalar.table);                                 \
    }

MLS_DEFINE_SUM_SQUARES(sum_squares_f16, f16, f16, 2, 2, same[MLS_REDUCE_SUM][MLS_F16])
MLS_DEFINE_SUM_SQUARES(sum_squares_f32, f32, f32, 4, 4, same[MLS_REDUCE_SUM][MLS_F32])

/* ---- bfloat16 sums with their squares ---- */

enum {
    FULL = 2 * FLOATS,
    QUARTERS = 4
}; /* FULL: items of a register. QUARTERS: registers of doubles for them, in the order
      even low, even high, odd low, odd high. */

/* Sums a full register of bfloat16 at byte `at` of `count` sources, divides by `by` if
 * `divides`, stores it at byte `at` of `out`, and adds the squares of the results to four
 * registers of lanes, in the order of QUARTERS. */
MLS_INLINED void sum_full(doubles *lanes, unsigned char *out, const void *const *sources,
                          size_t count, size_t at, floats by, bool divides)
{
    const floats first = floats_f32((const unsigned char *)sources[0] + at);
    floats even = even_bf16(first), odd = odd_bf16(first);
    for (size_t s = 1; s < count; s++) {
        const floats next = floats_f32((const unsigned char *)sources[s] + at);
        even = even + even_bf16(next);
        odd = odd + odd_bf16(next);
    }
    if (divides) {
        even = even / by;
        odd = odd / by;
    }
    const floats sums = join_bf16(even, odd);
    store_f32(out + at, sums);
    even = even_bf16(sums);
    odd = odd_bf16(sums);
    const doubles parts[QUARTERS] = {lower_half(even), upper_half(even), lower_half(odd),
                                     upper_half(odd)};
    MLS_UNROLLED
    for (size_t k = 0; k < QUARTERS; k++) {
        lanes[k] = lanes[k] + parts[k] * parts[k];
    }
}

/* Does the same as sum_squared_steps for bfloat16, with sum_full, and returns the number
 * of items done too; the lanes are then in the order of QUARTERS. `count` and `divides`
 * are constants. */
MLS_INLINED size_t sum_full_steps(doubles *lanes, unsigned char *out,
                                  const void *const *sources, size_t count, size_t start,
                                  size_t n, float divisor, bool divides)
{
    const floats by = repeat(divisor);
    size_t done = 0;
    for (; n - done >= SQUARED_STEP; done += SQUARED_STEP) {
        const size_t at = (start + done) * 2;
        for (size_t s = 0; s < count; s++) {
            prefetch_ahead((const unsigned char *)sources[s] + at,
                           (size_t)SQUARED_STEP * 2, false);
        }
        MLS_UNROLLED
        for (size_t k = 0; k < SQUARED_STEP; k += FULL) {
            sum_full(lanes + k % MLS_SQUARE_LANES / DOUBLES, out, sources, count,
                     at + k * 2, by, divides);
        }
    }
    return done;
}

/* Reorders the lanes from the order of QUARTERS, which sum_full uses, to the order of the
 * items. */
MLS_INLINED void order_lanes(doubles *lanes)
{
    double ordered[MLS_SQUARE_LANES], values[DOUBLES];
    for (size_t k = 0; k < SQUARES; k++) {
        store_f64((unsigned char *)values, lanes[k]);
        const size_t half = k % 2, odd = k % QUARTERS / 2;
        for (size_t j = 0; j < DOUBLES; j++) {
            ordered[k / QUARTERS * FULL + 2 * (half * DOUBLES + j) + odd] = values[j];
        }
    }
    for (size_t k = 0; k < SQUARES; k++) {
        lanes[k] = doubles_f64((const unsigned char *)(ordered + k * DOUBLES));
    }
}

/* Sums items `start` .. `start + n - 1`, at most a block, of `count` bfloat16 sources
 * into `out`, divides by `divisor`, and returns the sum of squares of the results. The
 * bits equal the results of sum_squares_run, but a full register of items is processed at
 * a time. The calls of sum_full_steps differ only in their constants, for which the
 * compiler makes separate loops. */
MLS_TARGET static double sum_squares_bf16(void *out, const void *const *sources,
                                          size_t count, size_t start, size_t n,
                                          double divisor)
{
    const float by = (float)divisor;
    const bool divides = by < 1 || by > 1;
    doubles lanes[SQUARES];
    size_t done;
    clear_lanes(lanes);
    if (divides) {
        done = sum_full_steps(lanes, out, sources, count, start, n, by, true);
    } else if (count == 2) {
        done = sum_full_steps(lanes, out, sources, 2, start, n, by, false);
    } else {
        done = sum_full_steps(lanes, out, sources, count, start, n, by, false);
    }
    order_lanes(lanes);
    const size_t rest = start + done;
    mls_reduce_scalar.same[MLS_REDUCE_SUM][MLS_BF16](out, sources, count, rest, n - done,
                                                     divisor);
    square_items(lanes, (const unsigned char *)out + rest * 2, n - done, 2, doubles_bf16);
    return fold_lanes(lanes);
}

/* The table that each including file defines; NULL entries use the scalar kernels. */
#define MLS_REDUCE_TABLE                                                                 \
    {                                                                                    \
        .same = {[MLS_REDUCE_SUM] = {[MLS_F16] = sum_f16,                                \
                                     [MLS_BF16] = sum_bf16,                              \
                                     [MLS_F32] = MLS_SUM_F32,                            \
                                     [MLS_F64] = sum_f64}},                              \
        .wide =                                                                          \
            {[MLS_REDUCE_SUM] = {[MLS_F16] = sum_wide_f16, [MLS_BF16] = sum_wide_bf16}}, \
        .add = {[MLS_F16] = {[MLS_F16] = add_f16_f16,                                    \
                             [MLS_BF16] = add_f16_bf16,                                  \
                             [MLS_F32] = add_f16_f32},                                   \
                [MLS_BF16] = {[MLS_F16] = add_bf16_f16,                                  \
                              [MLS_BF16] = add_bf16_bf16,                                \
                              [MLS_F32] = add_bf16_f32},                                 \
                [MLS_F32] = {[MLS_F16] = add_f32_f16,                                    \
                             [MLS_BF16] = add_f32_bf16,                                  \
                             [MLS_F32] = add_f32_f32},                                   \
                [MLS_F64] = {[MLS_F64] = add_f64_f64}},                                  \
        .scale = {[MLS_F16] = scale_f16,                                                 \
                  [MLS_BF16] = scale_bf16,                                               \
                  [MLS_F32] = scale_f32,                                                 \
                  [MLS_F64] = scale_f64},                                                \
        .squares = {[MLS_F16] = squares_f16,                                             \
                    [MLS_BF16] = squares_bf16,                                           \
                    [MLS_F32] = squares_f32,                                             \
                    [MLS_F64] = squares_f64},                                            \
        .sum_squares = {[MLS_F16] = sum_squares_f16,                                     \
                        [MLS_BF16] = sum_squares_bf16,                                   \
                        [MLS_F32] = sum_squares_f32},                                    \
    }

#endif
