/* delta: checks a delta of another process (gaps, values, array), grows its streams,
 * chooses the width of its gaps.
 *
 * A gap is the number of unchanged elements before a changed one. It has units of 1 or 2
 * bytes; the greatest unit, an escape, is continued by the next, any other ends a gap. */
#include "follow/delta_kernels.h"
#include "follow/delta_streams.h"

#include "base/memory.h"
#include "base/size.h"

enum {
    UNITS = 256 /* units that are checked together; a multiple of any vector's bytes */
};

/* Return the kernels for an instruction set. The AVX-512 kernels need VBMI2 too, which
 * not every processor with AVX-512 has. */
const mls_delta_kernels *mls_delta_kernels_of(mls_cpu cpu)
{
#if defined(__x86_64__)
    if (cpu == MLS_CPU_AVX512 && mls_delta_compress_offered()) {
        return &mls_delta_avx512;
    }
#endif
    return MLS_CPU_AVX2_TABLE(cpu, mls_delta);
}

void mls_delta_fini(mls_delta *delta)
{
    mls_free(delta->gaps);
    mls_free(delta->values);
    *delta = (mls_delta){0};
}

/* ---- checks ---- */

/* Check widths and sizes of the streams, without the content of `gaps`. MLS_E_FORMAT. */
static mls_code check_sizes(const mls_delta *delta, mls_status *st)
{
    const size_t item = delta->item_bytes;
    size_t values, bytes;
    if (delta->gap_bytes != 1 && delta->gap_bytes != 2) {
        return mls_fail(st, MLS_E_FORMAT, "gaps of a delta have 1 or 2 bytes, not %zu",
                        delta->gap_bytes);
    }
    if (item == 0 || item > 16 || (item & (item - 1)) != 0) {
        return mls_fail(st, MLS_E_FORMAT,
                        "elements of a delta have 1, 2, 4, 8 or 16 bytes, not %zu", item);
    }
    if (!mls_size_mul(delta->elements, item, &bytes)) {
        return mls_fail(st, MLS_E_FORMAT, "an array of %zu elements exceeds the memory",
                        delta->elements);
    }
    if (delta->gaps_bytes % delta->gap_bytes != 0) {
        return mls_fail(st, MLS_E_FORMAT,
                        "%zu bytes of gaps are not a multiple of %zu: the delta is cut",
                        delta->gaps_bytes, delta->gap_bytes);
    }
    if (!mls_size_mul(delta->changed, item, &values) || values != delta->values_bytes) {
        return mls_fail(st, MLS_E_FORMAT,
                        "%zu changed elements of %zu bytes, but %zu bytes of values: the "
                        "delta is cut",
                        delta->changed, item, delta->values_bytes);
    }
    return MLS_OK;
}

/* Set `*unchanged` to the sum of UNITS units of one byte, which is the number of
 * unchanged elements, and `*escapes` to the number of those that are escapes. A loop of
 * constant length, which compilers vectorize. */
static void add_units(const unsigned char *gaps, size_t *unchanged, size_t *escapes)
{
    uint32_t sum = 0, escaped = 0;
    for (size_t i = 0; i < UNITS; i++) {
        sum += gaps[i];
        escaped += gaps[i] == UINT8_MAX;
    }
    *unchanged = sum;
    *escapes = escaped;
}

/* Return the length of a part at the start of `gaps` whose units stay within the array: a
 * multiple of UNITS bytes, not always as long as possible. Adds its elements to `*next`
 * and the changed ones to `*changed`. Examines UNITS units of 1 byte at a time; wider
 * gaps are left to the caller. */
static size_t skip_valid_units(const mls_delta *delta, size_t *next, size_t *changed)
{
    size_t at = 0, unchanged, escapes;
    for (; delta->gap_bytes == 1 && delta->gaps_bytes - at >= UNITS; at += UNITS) {
        add_units(delta->gaps + at, &unchanged, &escapes);
        unchanged += UNITS - escapes;
        /* the next element needs a number too, if the last unit is an escape */
        if (unchanged >= delta->elements - *next) {
            break;
        }
        *next += unchanged;
        *changed += UNITS - escapes;
    }
    return at;
}

/* Check sizes and gaps of a delta. Units that skip_valid_units did not accept are
 * examined one by one, to find the offset of a wrong one. Sums cannot overflow: the loop
 * ends at the first number out of range. */
mls_code mls_delta_check(const mls_delta *delta, mls_status *st)
{
    size_t next = 0, changed = 0;
    const mls_code code = check_sizes(delta, st);
    if (code != MLS_OK) {
        return code;
    }
    const size_t width = delta->gap_bytes, escape = mls_delta_escape(width);
    for (size_t at = skip_valid_units(delta, &next, &changed); at < delta->gaps_bytes;
         at += width) {
        const size_t unit = mls_delta_unit(delta->gaps + at, width);
        if (unit >= delta->elements - next) {
            return mls_fail_at(st, at,
                               "gaps of a delta pass the end of an array of %zu elements",
                               delta->elements);
        }
        next += unit + (unit != escape);
        changed += unit != escape;
    }
    if (delta->gaps_bytes > 0 &&
        mls_delta_unit(delta->gaps + delta->gaps_bytes - width, width) == escape) {
        return mls_fail_at(st, delta->gaps_bytes - width,
                           "gaps of a delta end within a gap: the delta is cut");
    }
    if (changed != delta->changed) {
        return mls_fail(st, MLS_E_FORMAT, "a delta has %zu gaps for %zu values", changed,
                        delta->changed);
    }
    return MLS_OK;
}

/* Check that a delta belongs to an array. The dtype of the delta is not known here:
 * elements are compared by their size. */
mls_code mls_delta_check_target(const mls_delta *delta, const mls_tensor *target,
                                mls_status *st)
{
    size_t count = 0;
    if (!mls_tensor_count(target, &count) || count != delta->elements) {
        mls_fail(st, MLS_E_SHAPE,
                 "a delta of %zu elements does not belong to an array of %zu",
                 delta->elements, count);
        (void)mls_status_expected(st, "%zu elements", delta->elements);
        return mls_status_got(st, "%zu elements", count);
    }
    if (mls_tensor_item_bytes(target) != delta->item_bytes || target->swapped) {
        return mls_fail(st, MLS_E_DTYPE,
                        "a delta of elements of %zu bytes does not belong to %s%s",
                        delta->item_bytes, target->swapped ? "byte-swapped " : "",
                        mls_dtype_of(target->dtype)->name);
    }
    return MLS_OK;
}

/* ---- writing ---- */

/* Grow a stream, which has `*room` bytes, to at least `bytes`, and by half at least, so
 * that n appends copy O(n) bytes. Returns false if memory runs out; nothing changes
 * then. */
static bool grow_stream(unsigned char **stream, size_t *room, size_t bytes)
{
    if (bytes <= *room) {
        return true;
    }
    const size_t most = mls_size_most(bytes, *room + *room / 2);
    unsigned char *grown = mls_realloc(*stream, most, 1);
    if (grown == NULL) {
        return false;
    }
    *stream = grown;
    *room = most;
    return true;
}

/* Make room for `changed` elements with numbers below `end`; false if memory runs out.
 * Reserves for the worst case: an escape (the greatest unit, which the next one
 * continues) for each full gap up to `end`. */
bool mls_delta_reserve(mls_delta_writer *writer, size_t changed, size_t end)
{
    mls_delta *d = &writer->delta;
    const size_t escapes = (end - writer->next) / mls_delta_escape(d->gap_bytes);
    size_t gaps, values;
    return mls_size_add(changed, escapes, &gaps) &&
           mls_size_mul(gaps, d->gap_bytes, &gaps) &&
           mls_size_add(gaps, d->gaps_bytes, &gaps) &&
           mls_size_mul(changed, d->item_bytes, &values) &&
           mls_size_add(values, d->values_bytes, &values) &&
           grow_stream(&d->gaps, &writer->gaps_room, gaps) &&
           grow_stream(&d->values, &writer->values_room, values);
}

/* Return the number of bytes that the gaps of a delta with 1-byte gaps would have with a
 * width of 2 bytes. */
static size_t wide_bytes(const mls_delta *delta)
{
    mls_delta_reader reader = mls_delta_read(delta);
    size_t number, next = 0, units = delta->changed;
    while (mls_delta_next(&reader, 1, &number)) {
        units += (number - next) / mls_delta_escape(2);
        next = number + 1;
    }
    return units * 2;
}

/* Replace gaps of 1 byte by gaps of 2 bytes, which have `bytes` bytes (from wide_bytes):
 * fewer, because escapes are many. Returns false if memory runs out; nothing changes
 * then. */
static bool widen_gaps(mls_delta *delta, size_t bytes)
{
    mls_delta_writer wide = {.delta = {.gap_bytes = 2}};
    mls_delta_reader reader = mls_delta_read(delta);
    size_t number;
    wide.delta.gaps = mls_alloc(bytes, 1);
    if (wide.delta.gaps == NULL) {
        return false;
    }
    while (mls_delta_next(&reader, 1, &number)) {
        mls_delta_put(&wide, 2, number, NULL, 0);
    }
    mls_free(delta->gaps);
    delta->gaps = wide.delta.gaps;
    delta->gaps_bytes = wide.delta.gaps_bytes;
    delta->gap_bytes = 2;
    return true;
}

/* Give unused memory of a stream of `bytes` bytes back. An empty stream keeps one byte,
 * so that it has an address. Returns false if memory runs out; the stream is then
 * unchanged. */
static bool fit_stream(unsigned char **stream, size_t bytes)
{
    unsigned char *fitted = mls_realloc(*stream, mls_size_most(bytes, 1), 1);
    *stream = fitted == NULL ? *stream : fitted;
    return fitted != NULL;
}

/* Choose the width of the gaps, and give the delta to the caller; MLS_E_MEMORY if memory
 * runs out, or has run out before (`complete` is false). Count the bytes of wide gaps
 * only if these can be fewer. */
mls_code mls_delta_finish(mls_delta_writer *writer, bool complete, mls_delta *out,
                          mls_status *st)
{
    mls_delta *d = &writer->delta;
    /* fewer bytes are possible only if escapes outnumber the elements */
    if (complete && d->gaps_bytes - d->changed > d->changed) {
        const size_t bytes = wide_bytes(d);
        complete = bytes >= d->gaps_bytes || widen_gaps(d, bytes);
    }
    complete = complete && fit_stream(&d->gaps, d->gaps_bytes) &&
               fit_stream(&d->values, d->values_bytes);
    if (!complete) {
        const size_t changed = d->changed;
        mls_delta_fini(d);
        return mls_fail(st, MLS_E_MEMORY, "no memory for a delta of %zu elements",
                        changed);
    }
    *out = *d;
    return MLS_OK;
}
