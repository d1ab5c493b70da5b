/* reduce: which dtypes, divisors and scales a reduction accepts; its division into blocks
 * for threads and norms.
 *
 * reduce_scalar.c and reduce_loops.h have the arithmetic.
 *
 * All work is a job: a step that computes a range of the output, and the kernels that
 * compute its norm partial (sum of squares, number of elements that are not finite) while
 * the range is in the L1 cache. A job is divided into blocks, each with its own sum of
 * squares. The blocks' sums are added in order at the end, so no bit depends on the
 * threads.
 *
 * A complex number is two float32 items here: jobs count items, and a block has twice as
 * many of them.
 */
#include "gradients/reduce/reduce_kernels.h"

#include "array/overlap.h"
#include "array/strided_iter.h"

#include <math.h>
#include <stdio.h>

enum {
    TASK_BLOCKS = 16, /* blocks of a task: 64 Ki items */
    ROUND_BLOCKS =
        2048, /* blocks whose sums are kept on the stack until all are computed */
    SHARED_BYTES = 512 << 10, /* below this, waking a thread costs more than it saves */
    CHUNK = 256               /* strided elements gathered on the stack at a time */
};

/* Return the table of vector kernels for a processor. */
static const mls_reduce_kernels *kernels_of(mls_cpu cpu)
{
    return MLS_CPU_TABLE(cpu, mls_reduce);
}

/* ---- the kernels of a dtype ---- */

/* Return the dtype that the kernels see: a complex number is two items of float32. */
static mls_dtype item_dtype(mls_dtype dtype)
{
    return dtype == MLS_C64 ? MLS_F32 : dtype;
}

/* Return the kernel items of one element. */
static size_t items_per_element(mls_dtype dtype)
{
    return dtype == MLS_C64 ? 2 : 1;
}

/* Return whether a dtype is a float of 16 bits or more, or complex: mls_accumulate adds
 * to it with a scale, and mls_scale can scale it. */
static bool is_scalable(mls_dtype dtype)
{
    return (int)item_dtype(dtype) < MLS_CONVERTIBLE;
}

/* Return whether a dtype is a float of any width or complex. */
static bool is_float(mls_dtype dtype)
{
    return is_scalable(dtype) || mls_dtype_of(dtype)->kind == MLS_KIND_FLOAT8;
}

/* Return the kernel for a reduction, the scalar one if the table `k` has none; NULL: the
 * reduction is not supported. Only float32 outputs may have another dtype than
 * the sources. */
static mls_reduce_kernel reduce_kernel(const mls_reduce_kernels *k,
                                       const mls_reduction *r)
{
    const mls_dtype dtype = item_dtype(r->dtype);
    if (r->dtype == MLS_C64 && r->op != MLS_REDUCE_SUM) {
        return NULL;
    }
    if (r->out_dtype == r->dtype) {
        return k->same[r->op][dtype] != NULL ? k->same[r->op][dtype]
                                             : mls_reduce_scalar.same[r->op][dtype];
    }
    if (r->out_dtype != MLS_F32) {
        return NULL;
    }
    return k->wide[r->op][dtype] != NULL ? k->wide[r->op][dtype]
                                         : mls_reduce_scalar.wide[r->op][dtype];
}

/* Return the kernel for dst += scale * src of these float dtypes, the scalar one if the
 * instruction set has none. */
static mls_add_kernel add_kernel(const mls_reduce_kernels *k, mls_dtype dst,
                                 mls_dtype src)
{
    return k->add[dst][src] != NULL ? k->add[dst][src] : mls_reduce_scalar.add[dst][src];
}

/* Return the kernel for the sum of squares of a dtype, the scalar one if the instruction
 * set has none. */
static mls_squares_kernel squares_kernel(const mls_reduce_kernels *k, mls_dtype dtype)
{
    return k->squares[dtype] != NULL ? k->squares[dtype]
                                     : mls_reduce_scalar.squares[dtype];
}

/* Return the kernel that computes a sum and its squares in one pass; NULL if there is
 * none, also because the output has another dtype than the sources. */
static mls_sum_squares_kernel sum_squares_kernel(const mls_reduce_kernels *k,
                                                 const mls_reduction *r)
{
    const mls_dtype dtype = item_dtype(r->dtype);
    const bool is_offered = r->op == MLS_REDUCE_SUM && r->out_dtype == r->dtype;
    return is_offered && is_scalable(dtype) ? k->sum_squares[dtype] : NULL;
}

/* ---- jobs ---- */

typedef struct job job;

/* Computes `n` items of the job's output, from item `start` on. */
typedef void (*job_step)(const job *j, size_t start, size_t n);

struct job {
    job_step
        step; /* NULL: the output exists already, and only its norm partial is computed */
    size_t count;    /* items of the output */
    size_t block;    /* items of a block */
    mls_dtype dtype; /* dtype of the output's elements */
    size_t item;     /* bytes of an output item */
    unsigned char *out;
    mls_squares_kernel squares;         /* NULL: no norm partial is computed */
    mls_sum_squares_kernel sum_squares; /* NULL: run the step, then `squares` */
    mls_reduce_kernel reduce;           /* of reduce_step, which reads `sources` */
    const void *const *sources;
    size_t source_count;
    mls_add_kernel add; /* of add_step, which reads `src` */
    const unsigned char *src;
    size_t src_item;        /* bytes of an item of `src` */
    mls_scale_kernel scale; /* of scale_step */
    double number;          /* divisor, scale or factor */
};

/* Return a job without a step, over the `count` elements of this dtype at `out`.
 * `wants_norm`: the caller runs it with a norm partial, whose kernel is from `k`. */
static job job_over(const mls_reduce_kernels *k, mls_dtype dtype, void *out, size_t count,
                    bool wants_norm)
{
    const size_t items = items_per_element(dtype);
    return (job){.count = count * items,
                 .block = MLS_NORM_BLOCK * items,
                 .dtype = dtype,
                 .item = mls_dtype_of(dtype)->item_bytes / items,
                 .out = out,
                 .squares = wants_norm ? squares_kernel(k, item_dtype(dtype)) : NULL};
}

/* A part of a job: as many blocks as the sums on the stack have room for. */
typedef struct job_round {
    const job *j;
    size_t first, blocks; /* first block, and number of blocks */
    double squares[ROUND_BLOCKS];
    uint64_t nonfinite[ROUND_BLOCKS / TASK_BLOCKS]; /* of each task */
} job_round;

/* Count the non-finite elements of a block of n items at `at`, but only if `squares`,
 * their sum of squares, is not finite: otherwise there are none. (Float64 squares may
 * overflow without such elements; the count is then 0.) */
static uint64_t count_nonfinite(const job *j, double squares, const unsigned char *at,
                                size_t n)
{
    return isfinite(squares)
               ? 0
               : mls_reduce_nonfinite(j->dtype, at, n / items_per_element(j->dtype));
}

/* Compute `n` items of the output from item `start` on, one block, and return their sum
 * of squares; in one pass if a kernel can. */
static double block_squares(const job *j, size_t start, size_t n)
{
    if (j->sum_squares != NULL) {
        return j->sum_squares(j->out, j->sources, j->source_count, start, n, j->number);
    }
    if (j->step != NULL) {
        j->step(j, start, n);
    }
    return j->squares(j->out + start * j->item, n);
}

/* Thread function: compute TASK_BLOCKS blocks of a round, from block `index *
 * TASK_BLOCKS` on, and their figures, each block while it is in the cache. */
static void norm_task(void *context, size_t index)
{
    job_round *r = context;
    const job *j = r->j;
    const size_t from = index * TASK_BLOCKS, to = from + TASK_BLOCKS;
    uint64_t nonfinite = 0;
    for (size_t b = from; b < to && b < r->blocks; b++) {
        const size_t start = (r->first + b) * j->block, rest = j->count - start;
        const size_t n = rest < j->block ? rest : j->block;
        const double squares = block_squares(j, start, n);
        nonfinite += count_nonfinite(j, squares, j->out + start * j->item, n);
        r->squares[b] = squares;
    }
    r->nonfinite[index] = nonfinite;
}

/* Thread function: compute TASK_BLOCKS blocks of the output, without a norm partial. */
static void reduce_block_task(void *context, size_t index)
{
    const job *j = context;
    const size_t task_items = TASK_BLOCKS * j->block, start = index * task_items;
    const size_t rest = j->count - start;
    j->step(j, start, rest < task_items ? rest : task_items);
}

/* Return a / b, rounded up. */
static size_t divide_up(size_t a, size_t b)
{
    return a / b + (a % b != 0);
}

/* Add a block's sum of squares. All NaNs become one canonical NaN, so that the bits are
 * the same everywhere. */
static void add_squares(mls_norm_partial *partial, double squares)
{
    const double sum = partial->squares + squares;
    partial->squares = isnan(sum) ? mls_f64_nan() : sum;
}

/* Run a job, and add the sum of squares of its output and the number of its elements that
 * are not finite to `partial`. Each round of blocks is divided among the threads; then
 * the blocks' sums are added in order, so that no bit depends on the threads. */
static void job_norm(const job *j, mls_pool *pool, mls_norm_partial *partial)
{
    const size_t blocks = divide_up(j->count, j->block);
    job_round r; /* large, so not initialised: only written entries are read */
    r.j = j;
    for (r.first = 0; r.first < blocks; r.first += ROUND_BLOCKS) {
        const size_t rest = blocks - r.first;
        r.blocks = rest < ROUND_BLOCKS ? rest : ROUND_BLOCKS;
        const size_t tasks = divide_up(r.blocks, TASK_BLOCKS);
        mls_pool_run(pool, norm_task, &r, tasks);
        for (size_t b = 0; b < r.blocks; b++) {
            add_squares(partial, r.squares[b]);
        }
        for (size_t task = 0; task < tasks; task++) {
            partial->nonfinite += r.nonfinite[task];
        }
    }
}

/* Run a job over packed arrays. `partial`: receives the figures of the output; NULL: none
 * are computed. Threads of the pool (NULL: none) share large jobs. */
static void job_run(job *j, mls_pool *pool, mls_norm_partial *partial)
{
    mls_pool *shared = j->count >= SHARED_BYTES / j->item ? pool : NULL;
    if (partial != NULL) {
        job_norm(j, shared, partial);
    } else if (j->count > 0) {
        mls_pool_run(shared, reduce_block_task, j,
                     divide_up(j->count, TASK_BLOCKS * j->block));
    }
}

/* ---- reducing ---- */

/* Return the word for an operation in messages. */
static const char *op_name(mls_reduce_op op)
{
    return op == MLS_REDUCE_SUM ? "sum" : op == MLS_REDUCE_MIN ? "minimum" : "maximum";
}

/* Return whether a number is finite in the dtype of the computation: float64 if `wide`,
 * otherwise float32. */
static bool is_finite_number(double value, bool wide)
{
    return isfinite(wide ? value : (double)(float)value);
}

/* Written with comparisons because the build warns about float equality. */
static bool differs_from_one(double value)
{
    return !(value >= 1 && value <= 1);
}

/* Check that the divisor is finite and not 0 in the dtype of the computation, and 1
 * unless floats are summed. A divisor too small for float32 becomes 0, which is refused
 * too. */
static mls_code check_divisor(const mls_reduction *r, mls_status *st)
{
    const bool is_wide = r->dtype == MLS_F64;
    const double used = is_wide ? r->divisor : (double)(float)r->divisor;
    if (differs_from_one(r->divisor) &&
        (r->op != MLS_REDUCE_SUM || !is_float(r->dtype))) {
        return mls_fail(st, MLS_E_VALUE,
                        "the %s of %s cannot be divided by %g: only sums of floats can",
                        op_name(r->op), mls_dtype_of(r->dtype)->name, r->divisor);
    }
    if (!is_finite_number(r->divisor, is_wide) || !(fabs(used) > 0)) {
        return mls_fail(st, MLS_E_VALUE,
                        "a sum computed in %s cannot be divided by %g: choose a finite "
                        "number other than 0",
                        is_wide ? "float64" : "float32", r->divisor);
    }
    return MLS_OK;
}

/* Check whether the scalar table, which has all supported reductions, has a kernel; then
 * check the divisor. */
mls_code mls_reduce_check(const mls_reduction *r, mls_status *st)
{
    const char *name = mls_dtype_of(r->dtype)->name;
    const mls_reduction into_itself = {
        .dtype = r->dtype, .out_dtype = r->dtype, .op = r->op};
    if (reduce_kernel(&mls_reduce_scalar, r) != NULL) {
        return check_divisor(r, st);
    }
    if (mls_dtype_of(r->dtype)->kind == MLS_KIND_FLOAT8) {
        mls_fail(st, MLS_E_DTYPE,
                 "the %s of %s can only be computed as float32, not as %s",
                 op_name(r->op), name, mls_dtype_of(r->out_dtype)->name);
        mls_status_expected(st, "float32");
    } else if (reduce_kernel(&mls_reduce_scalar, &into_itself) == NULL) {
        return mls_fail(st, MLS_E_DTYPE, "the %s of %s is not defined", op_name(r->op),
                        name);
    } else {
        mls_fail(st, MLS_E_DTYPE, "the %s of %s cannot be computed as %s", op_name(r->op),
                 name, mls_dtype_of(r->out_dtype)->name);
        mls_status_expected(st, "%s", name);
    }
    return mls_status_got(st, "%s", mls_dtype_of(r->out_dtype)->name);
}

/* Check one array of a reduction: contiguous, aligned, native byte order, and as many
 * elements as `first`. `label` names it in messages. The two floats of a complex number
 * are read separately, so the alignment of a float is enough. MLS_E_SHAPE. */
static mls_code check_array(const mls_tensor *t, const char *label,
                            const mls_tensor *first, mls_status *st)
{
    const size_t unit = mls_tensor_item_bytes(t) / items_per_element(t->dtype);
    size_t count = 0, first_count = 0;
    if (!mls_tensor_is_contiguous(t) || t->swapped || (uintptr_t)t->data % unit != 0) {
        return mls_fail(st, MLS_E_SHAPE,
                        "%s must be C-contiguous, aligned and in this machine's byte "
                        "order: pass a copy",
                        label);
    }
    /* cannot overflow: the arrays are in memory */
    (void)mls_tensor_count(t, &count);
    (void)mls_tensor_count(first, &first_count);
    return count == first_count
               ? MLS_OK
               : mls_fail(st, MLS_E_SHAPE, "%s has %zu elements, sources[0] has %zu",
                          label, count, first_count);
}

/* Check the arrays of a reduction, and set `*n` and the dtypes of `r`. All arrays are
 * packed and have the same number of elements, so an equal address and dtype means the
 * same elements, and each element is read before it is written. An output of a wider
 * dtype at the same address would overwrite elements that are not read yet. */
mls_code mls_reduce_check_arrays(const mls_tensor *const *sources, size_t count,
                                 const mls_tensor *out, mls_reduction *r, size_t *n,
                                 mls_status *st)
{
    const mls_tensor *first = sources[0];
    for (size_t i = 0; i < count; i++) {
        char label[32];
        snprintf(label, sizeof label, "sources[%zu]", i);
        if (check_array(sources[i], label, first, st) != MLS_OK) {
            return st->code;
        }
        if (sources[i]->dtype != first->dtype) {
            return mls_fail(st, MLS_E_DTYPE, "%s is %s, sources[0] is %s", label,
                            mls_dtype_of(sources[i]->dtype)->name,
                            mls_dtype_of(first->dtype)->name);
        }
    }
    r->dtype = first->dtype;
    r->out_dtype = out->dtype;
    (void)mls_tensor_count(first, n);
    if (check_array(out, "out", first, st) != MLS_OK ||
        mls_reduce_check(r, st) != MLS_OK) {
        return st->code;
    }
    for (size_t i = 0; i < count; i++) {
        if (mls_tensor_overlap(out, sources[i]) &&
            (out->data != sources[i]->data || out->dtype != first->dtype)) {
            return mls_fail(st, MLS_E_OVERLAP, "out and sources[%zu] share memory", i);
        }
    }
    return MLS_OK;
}

/* Step of a job: reduce `n` items of all sources, from item `start` on. */
static void reduce_step(const job *j, size_t start, size_t n)
{
    j->reduce(j->out, j->sources, j->source_count, start, n, j->number);
}

/* More sources than this are not divided into ranges, because the addresses are on the
 * stack. */
enum { MOST_SOURCES = 64 };

/* Reduce n elements of `count` sources into `out`, on this thread, with ordinary stores.
 * `partial`: as in mls_reduce_run. */
static void reduce_through_cache(const mls_reduce_kernels *k, const mls_reduction *r,
                                 const void *const *sources, size_t count, void *out,
                                 size_t n, mls_norm_partial *partial)
{
    job j = job_over(k, r->out_dtype, out, n, partial != NULL);
    j.step = reduce_step;
    j.reduce = reduce_kernel(k, r);
    j.sum_squares = sum_squares_kernel(k, r);
    j.sources = sources;
    j.source_count = count;
    j.number = r->divisor;
    job_run(&j, NULL, partial);
}

/* Reduce n elements of `count` sources, at most MOST_SOURCES, block by block into a
 * buffer that stays in the L1 cache, and copy each block to `out` with stores of the kind
 * `store` (non-temporal). `partial`: as in mls_reduce_run. */
static void reduce_past_cache(const mls_kernels *kernels, const mls_reduction *r,
                              const void *const *sources, size_t count,
                              unsigned char *out, size_t n, mls_store store,
                              mls_norm_partial *partial)
{
    _Alignas(64) unsigned char block[MLS_NORM_BLOCK * 8];
    const mls_reduce_kernels *k = kernels_of(kernels->cpu);
    const size_t item = mls_dtype_of(r->dtype)->item_bytes;
    const size_t out_item = mls_dtype_of(r->out_dtype)->item_bytes;
    const void *at[MOST_SOURCES];
    for (size_t start = 0; start < n; start += MLS_NORM_BLOCK) {
        const size_t rest = n - start;
        const size_t length = rest < MLS_NORM_BLOCK ? rest : MLS_NORM_BLOCK;
        for (size_t i = 0; i < count; i++) {
            at[i] = (const unsigned char *)sources[i] + start * item;
        }
        reduce_through_cache(k, r, at, count, block, length, partial);
        kernels->copy(out + start * out_item, block, length * out_item, store);
    }
}

/* Reduce range by range, each with the kind of store that the store trial chooses. A
 * range has whole norm blocks, so the bits of the norm partial do not depend on the
 * trial. */
void mls_reduce_run(const mls_kernels *kernels, const mls_reduction *r,
                    const void *const *sources, size_t count, void *out, size_t n,
                    mls_destination destination, mls_norm_partial *partial)
{
    const size_t item = mls_dtype_of(r->dtype)->item_bytes;
    const size_t out_item = mls_dtype_of(r->out_dtype)->item_bytes;
    const void *at[MOST_SOURCES];
    if (count > MOST_SOURCES) {
        reduce_through_cache(kernels_of(kernels->cpu), r, sources, count, out, n,
                             partial);
        return;
    }
    mls_store_trial trial = mls_store_begin(kernels->choices, MLS_STORING_REDUCE,
                                            kernels->variants, destination, n * out_item);
    for (size_t start = 0, length; start < n; start += length) {
        const size_t rest = n - start, most = trial.left / out_item;
        unsigned char *const target = (unsigned char *)out + start * out_item;
        length = rest < most ? rest : most;
        for (size_t i = 0; i < count; i++) {
            at[i] = (const unsigned char *)sources[i] + start * item;
        }
        if (trial.store != MLS_STORE_STREAM) {
            reduce_through_cache(kernels_of(kernels->cpu), r, at, count, target, length,
                                 partial);
        } else {
            reduce_past_cache(kernels, r, at, count, target, length, trial.store,
                              partial);
        }
        mls_store_advance(&trial, length * out_item);
    }
    mls_store_end(&trial);
}

/* ---- checks of dst += scale * src ---- */

/* Check that both shapes are equal and countable. MLS_E_SHAPE ("expected" is the target's
 * shape, "got" the source's), MLS_E_SIZE. */
static mls_code check_shapes(const mls_tensor *dst, const mls_tensor *src, mls_status *st)
{
    char expected[MLS_FACT_BYTES], actual[MLS_FACT_BYTES];
    size_t count;
    if (!mls_shape_equal(dst->rank, dst->shape, src->rank, src->shape)) {
        mls_shape_text(expected, sizeof expected, dst->rank, dst->shape);
        mls_shape_text(actual, sizeof actual, src->rank, src->shape);
        mls_fail(st, MLS_E_SHAPE, "an array of shape %s cannot be added to one of %s",
                 actual, expected);
        return mls_status_differ(st, expected, actual);
    }
    if (!mls_tensor_count(dst, &count)) {
        return mls_fail(st, MLS_E_SIZE,
                        "an array has more elements than memory can hold");
    }
    return MLS_OK;
}

/* Return whether `src` can be added to `dst`: any float to a float of 16 bits or more, or
 * equal dtypes that have a sum. */
static bool can_add_dtypes(mls_dtype dst, mls_dtype src)
{
    if (dst == src) {
        return mls_reduce_scalar.same[MLS_REDUCE_SUM][item_dtype(dst)] != NULL;
    }
    return dst != MLS_C64 && src != MLS_C64 && is_scalable(dst) && is_float(src);
}

/* Check that the scale of dst += scale * src is finite in the dtype of the sum, and 1 for
 * integers. A NaN scale would destroy the array and is certainly a mistake. `dst` and
 * `src` are the dtypes. MLS_E_VALUE. */
static mls_code check_scale(mls_dtype dst, mls_dtype src, double scale, mls_status *st)
{
    const bool is_wide = dst == MLS_F64 || src == MLS_F64;
    if (!is_scalable(dst) && differs_from_one(scale)) {
        return mls_fail(st, MLS_E_VALUE, "%s cannot be scaled by %g: only floats can",
                        mls_dtype_of(dst)->name, scale);
    }
    if (!is_finite_number(scale, is_wide)) {
        return mls_fail(st, MLS_E_VALUE,
                        "a scale of %g is not finite in %s, the dtype of the sum", scale,
                        is_wide ? "float64" : "float32");
    }
    return MLS_OK;
}

/* Return whether an axis of several indices has stride 0, so that these share one
 * element. An empty view has none. */
static bool has_zero_stride(const mls_tensor *t)
{
    bool has_zero = false, empty = false;
    for (int axis = 0; axis < t->rank; axis++) {
        has_zero = has_zero || (t->shape[axis] > 1 && t->strides[axis] == 0);
        empty = empty || t->shape[axis] == 0;
    }
    return has_zero && !empty;
}

/* Check the arguments of mls_accumulate: shapes, dtypes, scale, then the memory. Cheap
 * checks come first. */
mls_code mls_accumulate_check(const mls_tensor *dst, const mls_tensor *src, double scale,
                              mls_status *st)
{
    if (check_shapes(dst, src, st) != MLS_OK) {
        return st->code;
    }
    if (!can_add_dtypes(dst->dtype, src->dtype)) {
        mls_fail(st, MLS_E_DTYPE, "%s cannot be added to %s",
                 mls_dtype_of(src->dtype)->name, mls_dtype_of(dst->dtype)->name);
        return mls_status_differ(st, mls_dtype_of(dst->dtype)->name,
                                 mls_dtype_of(src->dtype)->name);
    }
    if (check_scale(dst->dtype, src->dtype, scale, st) != MLS_OK) {
        return st->code;
    }
    if (has_zero_stride(dst)) {
        return mls_fail(st, MLS_E_OVERLAP,
                        "nothing can be added to an array that repeats its elements");
    }
    if (mls_tensor_overlap(dst, src) &&
        !(dst->dtype == src->dtype && mls_tensor_same_view(dst, src))) {
        return mls_fail(st, MLS_E_OVERLAP,
                        "an array cannot be added to one that it shares memory with, "
                        "unless they are the same: copy it first");
    }
    return MLS_OK;
}

/* ---- strided views ---- */

/* Return whether the elements of `t` along an axis of stride `step` bytes are packed and
 * in native byte order. */
static bool is_packed_run(const mls_tensor *t, ptrdiff_t step)
{
    const size_t item = mls_tensor_item_bytes(t);
    return step == (ptrdiff_t)item && (!t->swapped || item == 1);
}

/* Copy `count` elements of `t`, from address `at` on and `step` bytes apart, to packed
 * memory in this machine's byte order. */
static void gather_native(unsigned char *packed, const mls_tensor *t,
                          const unsigned char *at, ptrdiff_t step, size_t count)
{
    const size_t item = mls_tensor_item_bytes(t);
    mls_gather(packed, at, step, item, count);
    if (t->swapped && item > 1) {
        mls_swap_items(packed, count * item, mls_swap_unit(t->dtype));
    }
}

/* Store `count` packed elements in `t`, from address `at` on and `step` bytes apart, in
 * the byte order of `t`. Overwrites `packed`, which is swapped in place. */
static void scatter_native(const mls_tensor *t, unsigned char *at, ptrdiff_t step,
                           unsigned char *packed, size_t count)
{
    const size_t item = mls_tensor_item_bytes(t);
    if (t->swapped && item > 1) {
        mls_swap_items(packed, count * item, mls_swap_unit(t->dtype));
    }
    mls_scatter(at, step, packed, item, count);
}

/* Run the step of the job `like` on `count` packed elements at `out` and `src` instead of
 * its own. An integer sum reads `sources`, so these are replaced too. */
static void run_packed(const job *like, unsigned char *out, const unsigned char *src,
                       size_t count)
{
    const void *const sources[] = {out, src};
    job j = *like;
    j.out = out;
    j.src = src;
    if (j.sources != NULL) {
        j.sources = sources;
    }
    j.step(&j, 0, count * items_per_element(j.dtype));
}

/* Run a job's step on one row of both views, CHUNK elements at a time through packed
 * buffers. The row has `iter->length` elements; it begins at `at` in `t` and at `other`
 * in `src` (NULL: the step has no source). */
static void step_chunks(const job *j, const mls_tensor *t, const mls_tensor *src,
                        const mls_strided_iter *iter, unsigned char *at,
                        const unsigned char *other)
{
    unsigned char packed[CHUNK * 8], added[CHUNK * 8];
    for (size_t done = 0; done < iter->length; done += CHUNK) {
        const size_t rest = iter->length - done, count = rest < CHUNK ? rest : CHUNK;
        gather_native(packed, t, at, iter->a_step, count);
        if (src != NULL) {
            gather_native(added, src, other, iter->b_step, count);
            other += iter->b_step * (ptrdiff_t)count;
        }
        run_packed(j, packed, added, count);
        scatter_native(t, at, iter->a_step, packed, count);
        at += iter->a_step * (ptrdiff_t)count;
    }
}

/* Run a job's step on all elements of views that are not packed, in any order; `src` may
 * be NULL. Rows that are packed need no copy. */
static void run_strided(const job *j, const mls_tensor *t, const mls_tensor *src)
{
    mls_strided_iter iter;
    ptrdiff_t at = 0, other = 0;
    if (!mls_strided_iter_init(&iter, t, src)) {
        return;
    }
    const bool are_runs_packed =
        is_packed_run(t, iter.a_step) && (src == NULL || is_packed_run(src, iter.b_step));
    do {
        const unsigned char *from = src == NULL ? t->data + at : src->data + other;
        if (are_runs_packed) {
            run_packed(j, t->data + at, from, iter.length);
        } else {
            step_chunks(j, t, src, &iter, t->data + at, from);
        }
    } while (mls_strided_iter_next(&iter, &at, &other));
}

/* Return whether a tensor is contiguous and in native byte order. */
static bool is_packed(const mls_tensor *t)
{
    return mls_tensor_is_contiguous(t) && (!t->swapped || mls_tensor_item_bytes(t) == 1);
}

/* Prepare an iterator over the rows of `t` (its innermost axis) in C order;
 * mls_strided_iter_init may reorder axes, which would change the bits of a norm. Returns
 * false for an empty view. */
static bool rows_of(mls_strided_iter *iter, const mls_tensor *t)
{
    *iter = (mls_strided_iter){.length = 1,
                               .a_step = (ptrdiff_t)mls_tensor_item_bytes(t),
                               .rank = t->rank > 0 ? t->rank - 1 : 0};
    for (int axis = 0; axis < t->rank; axis++) {
        if (t->shape[axis] == 0) {
            return false;
        }
        iter->shape[axis] = t->shape[axis];
        iter->a_strides[axis] = iter->b_strides[axis] = t->strides[axis];
    }
    if (t->rank > 0) {
        iter->length = t->shape[iter->rank];
        iter->a_step = t->strides[iter->rank];
    }
    return true;
}

/* Elements of a strided tensor that are gathered so far; `j` computes their figures. */
typedef struct gathered {
    job j;
    size_t filled; /* elements */
    unsigned char items[MLS_NORM_BLOCK * 8];
} gathered;

/* Add the figures of the gathered elements to `partial`, and empty the buffer. */
static void add_gathered(gathered *g, mls_norm_partial *partial)
{
    g->j.out = g->items;
    g->j.count = g->filled * items_per_element(g->j.dtype);
    job_run(&g->j, NULL, partial);
    g->filled = 0;
}

/* Add the figures of a strided tensor to `partial`. Its elements are gathered in C order,
 * MLS_NORM_BLOCK at a time, so a packed copy has the same bits. */
static void norm_strided(const mls_reduce_kernels *k, const mls_tensor *t,
                         mls_norm_partial *partial)
{
    mls_strided_iter iter;
    gathered g; /* large, so not initialised: only written elements are read */
    const size_t item = mls_tensor_item_bytes(t);
    ptrdiff_t at = 0, unused = 0;
    g.j = job_over(k, t->dtype, NULL, 0, true);
    g.filled = 0;
    if (!rows_of(&iter, t)) {
        return;
    }
    do {
        const unsigned char *from = t->data + at;
        for (size_t done = 0; done < iter.length;) {
            const size_t room = MLS_NORM_BLOCK - g.filled, rest = iter.length - done;
            const size_t count = rest < room ? rest : room;
            gather_native(g.items + g.filled * item, t, from, iter.a_step, count);
            from += iter.a_step * (ptrdiff_t)count;
            done += count;
            g.filled += count;
            if (g.filled == MLS_NORM_BLOCK) {
                add_gathered(&g, partial);
            }
        }
    } while (mls_strided_iter_next(&iter, &at, &unused));
    add_gathered(&g, partial);
}

/* Run a job whose step works in place on `t`, packed or not; `src` is its second array or
 * NULL. `partial` receives the figures of the result; NULL: none. Threads of the pool
 * share only packed arrays; a view that is not packed takes a second pass for the
 * figures. */
static void run_in_place(mls_cpu cpu, mls_pool *pool, job *j, const mls_tensor *t,
                         const mls_tensor *src, mls_norm_partial *partial)
{
    if (is_packed(t) && (src == NULL || is_packed(src))) {
        job_run(j, pool, partial);
        return;
    }
    run_strided(j, t, src);
    if (partial != NULL) {
        mls_norm_partial_of(cpu, pool, t, partial);
    }
}

/* ---- dst += scale * src, t *= factor, norm partials ---- */

/* Step of a job: add scale * src to `n` items of the output, from item `start` on. */
static void add_step(const job *j, size_t start, size_t n)
{
    j->add(j->out + start * j->item, j->src + start * j->src_item, n, j->number);
}

/* Step of a job: multiply `n` items of the output, from item `start` on, by the
 * factor. */
static void scale_step(const job *j, size_t start, size_t n)
{
    j->scale(j->out + start * j->item, n, j->number);
}

/* Run a job that adds. Integers have no scale: they use the kernel for a sum of two
 * sources, the first of which is `dst`. */
mls_code mls_accumulate(mls_cpu cpu, mls_pool *pool, const mls_tensor *dst,
                        const mls_tensor *src, double scale, mls_norm_partial *partial,
                        mls_status *st)
{
    const mls_reduce_kernels *k = kernels_of(cpu);
    const void *const sources[] = {dst->data, src->data};
    size_t count = 0;
    if (mls_accumulate_check(dst, src, scale, st) != MLS_OK) {
        return st->code;
    }
    (void)mls_tensor_count(dst, &count); /* cannot overflow: checked */
    job j = job_over(k, dst->dtype, dst->data, count, partial != NULL);
    j.number = scale;
    if (is_scalable(dst->dtype)) {
        j.step = add_step;
        j.add = add_kernel(k, item_dtype(dst->dtype), item_dtype(src->dtype));
        j.src = src->data;
        j.src_item = mls_tensor_item_bytes(src) / items_per_element(src->dtype);
    } else {
        const mls_reduction r = {
            .dtype = dst->dtype, .out_dtype = dst->dtype, .op = MLS_REDUCE_SUM};
        j.step = reduce_step;
        j.reduce = reduce_kernel(k, &r);
        j.sources = sources;
        j.source_count = 2;
    }
    run_in_place(cpu, pool, &j, dst, src, partial);
    return MLS_OK;
}

/* Check the arguments of mls_scale: dtype, factor, strides and size. */
mls_code mls_scale_check(const mls_tensor *t, double factor, mls_status *st)
{
    const char *name = mls_dtype_of(t->dtype)->name;
    size_t count;
    if (!is_scalable(t->dtype)) {
        mls_fail(st, MLS_E_DTYPE,
                 "%s cannot be scaled: only float16, bfloat16, float32, float64 and "
                 "complex64 can",
                 name);
        return mls_status_got(st, "%s", name);
    }
    if (!is_finite_number(factor, t->dtype == MLS_F64)) {
        return mls_fail(st, MLS_E_VALUE, "%s cannot be scaled by %g", name, factor);
    }
    if (has_zero_stride(t)) {
        return mls_fail(st, MLS_E_OVERLAP,
                        "an array that repeats its elements cannot be scaled");
    }
    return mls_tensor_count(t, &count)
               ? MLS_OK
               : mls_fail(st, MLS_E_SIZE,
                          "an array has more elements than memory can hold");
}

/* Run a job that multiplies. Unlike mls_accumulate it computes no norm. */
mls_code mls_scale(mls_cpu cpu, mls_pool *pool, const mls_tensor *t, double factor,
                   mls_status *st)
{
    const mls_reduce_kernels *k = kernels_of(cpu);
    size_t count = 0;
    if (mls_scale_check(t, factor, st) != MLS_OK) {
        return st->code;
    }
    (void)mls_tensor_count(t, &count); /* cannot overflow: checked */
    job j = job_over(k, t->dtype, t->data, count, false);
    const mls_dtype dtype = item_dtype(t->dtype);
    j.step = scale_step;
    j.scale = k->scale[dtype] != NULL ? k->scale[dtype] : mls_reduce_scalar.scale[dtype];
    j.number = factor;
    run_in_place(cpu, pool, &j, t, NULL, NULL);
    return MLS_OK;
}

/* Check whether the scalar table has a kernel for the sum of squares: packed dtypes have
 * none. */
mls_code mls_norm_partial_check(const mls_tensor *t, mls_status *st)
{
    const char *name = mls_dtype_of(t->dtype)->name;
    if (mls_reduce_scalar.squares[item_dtype(t->dtype)] == NULL) {
        mls_fail(st, MLS_E_DTYPE, "%s has no norm: several elements share a byte", name);
        return mls_status_got(st, "%s", name);
    }
    return MLS_OK;
}

/* Add the figures of an array to `partial`. Threads of the pool (NULL: none) share a
 * packed array. An array with more elements than size_t can count has strides of 0; like
 * every unpacked array it is read row by row. */
void mls_norm_partial_of(mls_cpu cpu, mls_pool *pool, const mls_tensor *t,
                         mls_norm_partial *partial)
{
    const mls_reduce_kernels *k = kernels_of(cpu);
    size_t count = 0;
    if (is_packed(t) && mls_tensor_count(t, &count)) {
        job j = job_over(k, t->dtype, t->data, count, true);
        job_run(&j, pool, partial);
    } else {
        norm_strided(k, t, partial);
    }
}
