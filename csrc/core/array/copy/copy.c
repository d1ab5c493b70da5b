/* copy: copies and converts strided views of any dtype and byte order; encodes or refuses
 * the value of a fill.
 *
 * Views are first simplified into runs (strided_iter.h), sorted by the destination's
 * strides. If both sides are packed and in this machine's byte order, a kernel handles
 * the whole run. Otherwise the run passes through a stack buffer in chunks: gather, swap
 * bytes, convert, scatter.
 *
 * Large results are stored part by part: a part may be a trial, which is timed to choose
 * between stores through the cache and past it (cpu_store_choice.h). Elements may be
 * moved in any order, since the two views do not overlap.
 */
#include "array/copy/copy.h"

#include "array/copy/copy_kernels.h"
#include "array/float_convert.h"
#include "array/strided_iter.h"
#include "base/size.h"

#include <math.h>
#include <string.h>

enum {
    CHUNK = 256,            /* elements that pass through the stack buffer at a time */
    STREAM_RUN = 1024,      /* bytes; streaming does not pay off for shorter runs */
    FRESH_PART = 256 << 10, /* bytes; see next_part */
};

const mls_kernels *mls_kernels_of(mls_cpu cpu)
{
    return MLS_CPU_TABLE(cpu, mls_kernels);
}

/* ---- encoding one element ---- */

/* The values that an integer type can hold. The upper end is excluded, because 2**64 is a
 * double and 2**64 - 1 is not. */
typedef struct integer_range {
    double low, end; /* low <= value < end; both are exact */
} integer_range;

/* Return the values that an integer or bool type can hold; an empty range for other
 * types. */
static integer_range range_of(mls_dtype dtype)
{
    switch (dtype) {
    case MLS_BOOL:
        return (integer_range){0, 2};
    case MLS_U8:
    case MLS_U16:
    case MLS_U32:
    case MLS_U64:
        return (integer_range){0, ldexp(1, 8 * (int)mls_dtype_of(dtype)->item_bytes)};
    case MLS_I8:
    case MLS_I16:
    case MLS_I32:
    case MLS_I64: {
        const double end = ldexp(1, 8 * (int)mls_dtype_of(dtype)->item_bytes - 1);
        return (integer_range){-end, end};
    }
    default:
        return (integer_range){0, 0};
    }
}

/* Return whether a value is 0 or -0. Compares bits, because the code base does not
 * compare floats for equality. */
static bool is_exactly_zero(double value)
{
    return mls_f64_bits(value) << 1 == 0;
}

/* Store an integral value in two's complement as 8 bytes, lowest byte first. */
static void encode_integer(double value, unsigned char *bytes)
{
    mls_store_le64(bytes, value < 0 ? (uint64_t)(int64_t)value : (uint64_t)value);
}

/* Store `value` rounded to `dtype`, a float type of 16 to 64 bits, in this machine's byte
 * order. Returns false if a finite value became infinite. Infinity and NaN are stored as
 * they are. */
static bool encode_float(double value, mls_dtype dtype, unsigned char *bytes)
{
    double reads_as;
    if (dtype == MLS_F64) {
        memcpy(bytes, &value, sizeof value);
        return true;
    }
    if (dtype == MLS_F32) {
        const float single = (float)value;
        memcpy(bytes, &single, sizeof single);
        reads_as = (double)single;
    } else {
        const uint16_t half =
            dtype == MLS_F16 ? mls_f16_from_f64(value) : mls_bf16_from_f32((float)value);
        memcpy(bytes, &half, sizeof half);
        reads_as =
            (double)(dtype == MLS_F16 ? mls_f32_from_f16(half) : mls_f32_from_bf16(half));
    }
    return isinf(value) || !isinf(reads_as);
}

/* Encode one value in dtype and byte order of the destination. Round floats; integers
 * must be exact, and all other types accept only zero. */
mls_code mls_element_encode(double value, const mls_tensor *destination, mls_element *out,
                            mls_status *st)
{
    const mls_dtype dtype = destination->dtype;
    mls_element element = {.size = mls_dtype_of(dtype)->item_bytes};
    const integer_range range = range_of(dtype);
    if ((int)dtype < MLS_CONVERTIBLE) {
        if (!encode_float(value, dtype, element.bytes)) {
            return mls_fail(st, MLS_E_VALUE, "%g is beyond the range of %s", value,
                            mls_dtype_of(dtype)->name);
        }
    } else if (range.end > 0) {
        if (!(value >= range.low && value < range.end) || floor(value) < value) {
            return mls_fail(st, MLS_E_VALUE, "%g cannot be stored as %s", value,
                            mls_dtype_of(dtype)->name);
        }
        encode_integer(value, element.bytes);
        /* on a big-endian machine the low bytes come last */
        if (!mls_is_little_endian()) {
            mls_swap_items(element.bytes, 8, 8);
            memmove(element.bytes, element.bytes + 8 - element.size, element.size);
        }
    } else if (!is_exactly_zero(value)) { /* float8_e8m0fnu: zero bytes are 2**-127 */
        return mls_fail(st, MLS_E_DTYPE, "%s can only be padded with 0, not %g",
                        mls_dtype_of(dtype)->name, value);
    }
    if (destination->swapped) {
        mls_swap_items(element.bytes, element.size, mls_swap_unit(dtype));
    }
    *out = element;
    return MLS_OK;
}

/* ---- copying ---- */

/* Check shapes and dtypes of a copy. Report the source's shape as expected and the
 * target's as got, because users choose the target. */
mls_code mls_copy_check(const mls_tensor *dst, const mls_tensor *src, const char *label,
                        mls_status *st)
{
    char src_shape[MLS_FACT_BYTES], dst_shape[MLS_FACT_BYTES];
    if (!mls_shape_equal(dst->rank, dst->shape, src->rank, src->shape)) {
        mls_shape_text(src_shape, sizeof src_shape, src->rank, src->shape);
        mls_shape_text(dst_shape, sizeof dst_shape, dst->rank, dst->shape);
        mls_fail(st, MLS_E_SHAPE, "%s: the target has shape %s, the source %s", label,
                 dst_shape, src_shape);
        return mls_status_differ(st, src_shape, dst_shape);
    }
    if (!mls_dtype_converts(src->dtype, dst->dtype)) {
        mls_fail(st, MLS_E_DTYPE,
                 "%s: %s does not convert to %s; offered are float16, bfloat16, float32 "
                 "and float64 among each other",
                 label, mls_dtype_of(src->dtype)->name, mls_dtype_of(dst->dtype)->name);
        return mls_status_differ(st, mls_dtype_of(src->dtype)->name,
                                 mls_dtype_of(dst->dtype)->name);
    }
    return MLS_OK;
}

/* How the elements of one copy are moved: the same for all of its runs. */
typedef struct copier {
    const mls_kernels *kernels;
    mls_convert_run convert; /* NULL: same dtype */
    mls_dtype dst_dtype, src_dtype;
    size_t dst_item, src_item;
    bool dst_swapped, src_swapped;
    bool is_fresh; /* of the destination; see next_part */
} copier;

/* Copy `count` elements, at most CHUNK, through the stack: gather, swap bytes, convert,
 * swap bytes, scatter. Strides are the bytes between two elements. */
static void copy_chunk(const copier *c, unsigned char *dst, ptrdiff_t dst_stride,
                       const unsigned char *src, ptrdiff_t src_stride, size_t count)
{
    unsigned char packed[CHUNK * 8];
    unsigned char converted[CHUNK * 8];
    unsigned char *ready = packed;
    mls_gather(packed, src, src_stride, c->src_item, count);
    if (c->src_swapped) {
        mls_swap_items(packed, count * c->src_item, mls_swap_unit(c->src_dtype));
    }
    if (c->convert != NULL) {
        c->convert(converted, packed, count, MLS_STORE_CACHED);
        ready = converted;
    }
    if (c->dst_swapped) {
        mls_swap_items(ready, count * c->dst_item, mls_swap_unit(c->dst_dtype));
    }
    mls_scatter(dst, dst_stride, ready, c->dst_item, count);
}

/* Copy a run of `count` elements that kernels cannot copy, because they are not adjacent
 * or have the other byte order. Strides are the bytes between two elements. */
static void copy_chunks(const copier *c, unsigned char *dst, ptrdiff_t dst_stride,
                        const unsigned char *src, ptrdiff_t src_stride, size_t count)
{
    while (count > 0) {
        const size_t part = count < CHUNK ? count : CHUNK;
        copy_chunk(c, dst, dst_stride, src, src_stride, part);
        dst += dst_stride * (ptrdiff_t)part;
        src += src_stride * (ptrdiff_t)part;
        count -= part;
    }
}

/* Return a copier for these two views, with the kernel for their dtypes. `is_fresh` is
 * left false. Items of one byte need no swap. */
static copier copier_for(const mls_kernels *kernels, const mls_tensor *dst,
                         const mls_tensor *src)
{
    copier c = {.kernels = kernels,
                .dst_dtype = dst->dtype,
                .src_dtype = src->dtype,
                .dst_item = mls_tensor_item_bytes(dst),
                .src_item = mls_tensor_item_bytes(src),
                .dst_swapped = dst->swapped && mls_tensor_item_bytes(dst) > 1,
                .src_swapped = src->swapped && mls_tensor_item_bytes(src) > 1};
    if (dst->dtype != src->dtype) {
        c.convert = kernels->convert[src->dtype][dst->dtype];
    } else if (c.dst_swapped && c.src_swapped) { /* both swapped: copy plain bytes */
        c.dst_swapped = c.src_swapped = false;
    }
    return c;
}

/* Begin to store the elements of `dst` in runs of `count` adjacent ones; `count` is 0 if
 * kernels do not store them. `operation` is measured on its own, and `destination`
 * describes the whole result. Returns the kind of store, and the trial that measures it
 * if there is one. Short runs use plain stores. */
static mls_store_trial begin_runs(const mls_kernels *kernels,
                                  mls_store_operation operation, const mls_tensor *dst,
                                  size_t count, mls_destination destination)
{
    size_t bytes = 0;
    const unsigned variants =
        operation == MLS_STORING_COPY ? kernels->copy_variants : kernels->variants;
    (void)mls_tensor_bytes(dst,
                           &bytes); /* the view exists, so its size does not overflow */
    if (count * mls_tensor_item_bytes(dst) < STREAM_RUN) {
        destination = mls_cached();
    }
    return mls_store_begin(kernels->choices, operation, variants, destination, bytes);
}

/* Elements first .. first + count - 1 of a run. */
typedef struct part {
    size_t first, count;
} part;

/* Return which of the `left` elements of a run to store next: all, or as many as the
 * trial has room for (`trial->left` bytes), and at most FRESH_PART bytes in fresh memory.
 * `item` is the size of an element in bytes.
 *
 * Fresh memory is written from its end. The first store to a huge page makes the system
 * clear it in ascending order, so the end of the page is cached and the beginning is not.
 * This order took 0.65 times as long for a copy to fresh memory (64 MiB, AMD EPYC family
 * 25 model 17). */
static part next_part(const mls_store_trial *trial, size_t left, size_t item,
                      bool is_fresh)
{
    size_t most = trial->left / item;
    if (is_fresh && most > FRESH_PART / item) {
        most = FRESH_PART / item;
    }
    const size_t count = left < most ? left : most;
    return (part){.first = is_fresh ? left - count : 0, .count = count};
}

/* Copy a run of `count` adjacent elements in this machine's byte order, with kernels,
 * part by part as the trial demands. In fresh memory `to` and `from` do not advance,
 * since its parts are written from the end (see next_part). */
static void copy_run(const copier *c, mls_store_trial *trial, unsigned char *to,
                     const unsigned char *from, size_t count)
{
    while (count > 0) {
        const part next = next_part(trial, count, c->dst_item, c->is_fresh);
        unsigned char *const dst = to + next.first * c->dst_item;
        const unsigned char *const src = from + next.first * c->src_item;
        if (c->convert == NULL) {
            c->kernels->copy(dst, src, next.count * c->dst_item, trial->store);
        } else {
            c->convert(dst, src, next.count, trial->store);
        }
        mls_store_advance(trial, next.count * c->dst_item);
        if (!c->is_fresh) {
            to += next.count * c->dst_item;
            from += next.count * c->src_item;
        }
        count -= next.count;
    }
}

/* Return the operation as which a copy is measured (cpu_store_choice.h). */
static mls_store_operation operation_of(const copier *c)
{
    if (c->convert == NULL) {
        return MLS_STORING_COPY;
    }
    return c->dst_item > c->src_item ? MLS_STORING_WIDEN : MLS_STORING_NARROW;
}

/* Copy all elements, run by run: the iterator joins axes, so that a run is as long as
 * possible. */
void mls_copy(const mls_kernels *kernels, const mls_tensor *dst, const mls_tensor *src,
              mls_destination destination)
{
    mls_strided_iter iter;
    if (!mls_strided_iter_init(&iter, dst, src)) {
        return;
    }
    copier c = copier_for(kernels, dst, src);
    c.is_fresh = destination.is_fresh;
    const size_t count = iter.length;
    const ptrdiff_t dst_stride = iter.a_step;
    const ptrdiff_t src_stride = iter.b_step;
    /* packed on both sides and in this machine's byte order: kernels can copy the run */
    const bool is_packed = dst_stride == (ptrdiff_t)c.dst_item &&
                           src_stride == (ptrdiff_t)c.src_item && !c.dst_swapped &&
                           !c.src_swapped;
    mls_store_trial trial =
        begin_runs(kernels, operation_of(&c), dst, is_packed ? count : 0, destination);
    ptrdiff_t dst_at = 0, src_at = 0;
    do {
        unsigned char *to = dst->data + dst_at;
        const unsigned char *from = src->data + src_at;
        if (is_packed) {
            copy_run(&c, &trial, to, from, count);
        } else {
            copy_chunks(&c, to, dst_stride, from, src_stride, count);
        }
    } while (mls_strided_iter_next(&iter, &dst_at, &src_at));
    mls_store_end(&trial);
}

/* Copy the bytes as items of one byte. Short copies always store through the cache,
 * without a measurement. */
void mls_copy_bytes(const mls_kernels *kernels, void *dst, const void *src, size_t bytes,
                    mls_destination destination)
{
    const copier c = {.kernels = kernels,
                      .dst_item = 1,
                      .src_item = 1,
                      .is_fresh = destination.is_fresh};
    if (bytes < STREAM_RUN) {
        destination = mls_cached();
    }
    mls_store_trial trial = mls_store_begin(kernels->choices, MLS_STORING_COPY,
                                            kernels->copy_variants, destination, bytes);
    copy_run(&c, &trial, dst, src, bytes);
    mls_store_end(&trial);
}

/* Return the element repeated to 8 bytes. Every item size divides eight, so the
 * repetitions fill the pattern. */
uint64_t mls_element_pattern(mls_element element)
{
    unsigned char bytes[8];
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = element.bytes[i % element.size];
    }
    uint64_t pattern;
    memcpy(&pattern, bytes, sizeof pattern);
    return pattern;
}

/* Store `pattern` over `count` adjacent elements of `item` bytes from `to` on, part by
 * part as the trial demands. Every item size divides eight, so the pattern may start anew
 * at any element. */
static void fill_run(const mls_kernels *kernels, mls_store_trial *trial,
                     unsigned char *to, uint64_t pattern, size_t item, size_t count)
{
    while (count > 0) {
        const part next = next_part(trial, count, item, false);
        kernels->fill(to, pattern, next.count * item, trial->store);
        mls_store_advance(trial, next.count * item);
        to += next.count * item;
        count -= next.count;
    }
}

/* Store one element in all elements of a view. Fill run by run, with the kernel if the
 * elements of a run are adjacent. */
void mls_fill(const mls_kernels *kernels, const mls_tensor *dst, mls_element element,
              mls_destination destination)
{
    mls_strided_iter iter;
    if (!mls_strided_iter_init(&iter, dst, NULL)) {
        return;
    }
    const size_t count = iter.length;
    const ptrdiff_t stride = iter.a_step;
    const uint64_t pattern = mls_element_pattern(element);
    const bool is_packed = stride == (ptrdiff_t)element.size;
    mls_store_trial trial =
        begin_runs(kernels, MLS_STORING_FILL, dst, is_packed ? count : 0, destination);
    ptrdiff_t at = 0, unused = 0; /* the iterator's second offset: here it has one view */
    do {
        unsigned char *to = dst->data + at;
        if (is_packed) {
            fill_run(kernels, &trial, to, pattern, element.size, count);
        } else {
            for (size_t i = 0; i < count; i++, to += stride) {
                memcpy(to, element.bytes, element.size);
            }
        }
    } while (mls_strided_iter_next(&iter, &at, &unused));
    mls_store_end(&trial);
}
