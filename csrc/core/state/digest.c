/* digest: keys, words and blocks of the definition in digest.h; parts of tensors, run by
 * run and with threads.
 *
 * A part is iterated together with its place in the whole tensor: the runs are then
 * consecutive bytes of the whole, and elements that are not adjacent in memory are packed
 * into a buffer first. All sums are of integers, so threads add in any order.
 */
#include "state/digest.h"

#include "array/strided_iter.h"
#include "base/size.h"
#include "state/digest_kernels.h"

#include <stdatomic.h>
#include <string.h>

enum {
    WORD = 4,             /* bytes */
    PACKED = 4096,        /* bytes that are packed at a time */
    SHARE_BYTES = 1 << 20 /* of a task */
};

/* ---- keys ---- */

/* splitmix64, by Steele, Lea and Flood (2014). */
static uint64_t mix(uint64_t number)
{
    uint64_t z = number + 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
}

void mls_digest_keys_init(mls_digest_keys *keys)
{
    for (size_t word = 0; word < MLS_DIGEST_BLOCK; word++) {
        const uint64_t mixed = mix(word);
        keys->of_word[0][word] = (uint32_t)mixed | 1U;
        keys->of_word[1][word] = (uint32_t)(mixed >> 32) | 1U;
    }
}

static uint64_t key_of_block(uint64_t block, int lane)
{
    return mix(((uint64_t)1 << 36) + MLS_DIGEST_LANES * block + (uint64_t)lane) | 1U;
}

/* ---- bytes ---- */

/* The bytes are summed block by block; a word that is cut at either end counts with zeros
 * in place of the bytes that are not its own. */
void mls_digest_bytes(const mls_digester *digester, uint64_t offset, const void *data,
                      size_t bytes, mls_digest *sum)
{
    const mls_digest_kernels *const kernels = MLS_CPU_TABLE(digester->cpu, mls_digest);
    const unsigned char *from = data;
    while (bytes > 0) {
        const uint64_t word = offset / WORD;
        const size_t first = (size_t)(word % MLS_DIGEST_BLOCK), cut = offset % WORD;
        unsigned char padded[WORD] = {0};
        const unsigned char *values = from;
        size_t count = 1, size;
        if (cut > 0 || bytes < WORD) {
            size = mls_size_least(WORD - cut, bytes);
            memcpy(padded + cut, from, size);
            values = padded;
        } else {
            count = mls_size_least(bytes / WORD, MLS_DIGEST_BLOCK - first);
            size = WORD * count;
        }
        uint64_t totals[MLS_DIGEST_LANES] = {0};
        kernels->add_words(digester->keys, first, values, count, totals);
        for (int lane = 0; lane < MLS_DIGEST_LANES; lane++) {
            sum->lanes[lane] +=
                totals[lane] * key_of_block(word / MLS_DIGEST_BLOCK, lane);
        }
        offset += size, from += size, bytes -= size;
    }
}

/* ---- parts ---- */

/* The digest of a part of a tensor, in progress; constant except `lanes`. */
typedef struct part_job {
    const mls_digester *digester;
    mls_strided_iter runs; /* a: the place in the whole; b: the part in memory */
    const unsigned char *data;
    uint64_t start;      /* byte of the whole at which the part begins */
    size_t item, unit;   /* bytes of an element; of those that are reversed together */
    size_t count, share; /* elements: of the part, of a task */
    atomic_uint_fast64_t lanes[MLS_DIGEST_LANES];
} part_job;

/* Add the digest of `count` elements of a run, which begins at byte `offset` of the whole
 * and at `from`. */
static void add_run(const part_job *job, uint64_t offset, const unsigned char *from,
                    size_t count, mls_digest *sum)
{
    const mls_strided_iter *runs = &job->runs;
    const bool follows = runs->a_step == (ptrdiff_t)job->item; /* adjacent in the whole */
    if (follows && runs->b_step == runs->a_step && job->unit == 1) {
        mls_digest_bytes(job->digester, offset, from, count * job->item, sum);
        return;
    }
    unsigned char packed[PACKED];
    const size_t most = follows ? PACKED / job->item : 1;
    while (count > 0) {
        const size_t next = mls_size_least(count, most);
        mls_gather(packed, from, runs->b_step, job->item, next);
        if (job->unit > 1) {
            mls_swap_items(packed, next * job->item, job->unit);
        }
        mls_digest_bytes(job->digester, offset, packed, next * job->item, sum);
        offset += (uint64_t)runs->a_step * next;
        from += runs->b_step * (ptrdiff_t)next;
        count -= next;
    }
}

/* Prefetch the start of the run that comes AHEAD runs after the one at `from`. Processors
 * do not foresee rows in other pages: without it, rows of 256 bytes took 1.5 times as
 * long (Intel Xeon, family 6 model 167). */
static void prefetch_run(const mls_strided_iter *runs, const unsigned char *from)
{
    enum { AHEAD = 4, LINE = 64, MOST = 512 };
    if (runs->rank > 0) {
        const uintptr_t next =
            (uintptr_t)from + AHEAD * (uintptr_t)runs->b_strides[runs->rank - 1];
        const size_t bytes = mls_size_least(runs->length * (size_t)runs->a_step, MOST);
        for (size_t at = 0; at < bytes; at += LINE) {
            __builtin_prefetch((const void *)(next + at));
        }
    }
}

/* Thread function: add the digest of the elements of share number `task`, counted in the
 * order of the runs. */
static void add_share(void *context, size_t task)
{
    part_job *job = context;
    mls_strided_iter runs = job->runs;
    size_t first = task * job->share;
    size_t left = mls_size_least(job->count - first, job->share);
    ptrdiff_t at = 0, from = 0;
    mls_digest sum = {{0}};
    mls_strided_iter_seek(&runs, first / runs.length, &at, &from);
    first %= runs.length;
    do {
        const size_t count = mls_size_least(runs.length - first, left);
        prefetch_run(&runs, job->data + from);
        add_run(job, job->start + (uint64_t)at + (uint64_t)runs.a_step * first,
                job->data + from + runs.b_step * (ptrdiff_t)first, count, &sum);
        left -= count;
        first = 0;
    } while (left > 0 && mls_strided_iter_next(&runs, &at, &from));
    for (int lane = 0; lane < MLS_DIGEST_LANES; lane++) {
        atomic_fetch_add(&job->lanes[lane], sum.lanes[lane]);
    }
}

/* Set the strides of `place`, a view with the axes of a part, to the strides of a whole
 * tensor with the lengths `shape` in C order, and `*start` to the byte at which the part
 * begins. MLS_E_SHAPE, MLS_E_SIZE. */
static mls_code find_place(mls_tensor *place, const size_t *shape, const size_t *starts,
                           uint64_t *start, mls_status *st)
{
    size_t stride = mls_tensor_item_bytes(place);
    *start = 0;
    for (int axis = place->rank - 1; axis >= 0; axis--) {
        if (starts[axis] > shape[axis] ||
            place->shape[axis] > shape[axis] - starts[axis]) {
            return mls_fail(st, MLS_E_SHAPE,
                            "axis %d has %zu elements from %zu on, more than the %zu of "
                            "the whole tensor",
                            axis, place->shape[axis], starts[axis], shape[axis]);
        }
        place->strides[axis] = (ptrdiff_t)stride;
        *start += (uint64_t)stride * starts[axis];
        if (!mls_size_mul(stride, shape[axis], &stride) || stride > PTRDIFF_MAX) {
            return mls_fail(st, MLS_E_SIZE, "the tensor exceeds the address space");
        }
    }
    return MLS_OK;
}

mls_code mls_digest_part(const mls_digester *digester, const mls_tensor *part,
                         const size_t *shape, const size_t *starts, mls_digest *sum,
                         mls_status *st)
{
    mls_tensor place = *part;
    part_job job = {.digester = digester, .data = part->data};
    const mls_code code = find_place(&place, shape, starts, &job.start, st);
    if (code != MLS_OK || !mls_strided_iter_init(&job.runs, &place, part)) {
        return code; /* MLS_OK for a part without elements */
    }
    job.item = mls_tensor_item_bytes(part);
    /* "swapped" is relative to this machine, and the definition to no machine */
    job.unit = part->swapped == mls_is_little_endian() ? mls_swap_unit(part->dtype) : 1;
    (void)mls_tensor_count(part, &job.count); /* fits: the whole does */
    const bool is_large = job.count * job.item >= MLS_POOL_COPY_BYTES;
    job.share = is_large ? SHARE_BYTES / job.item : job.count;
    mls_pool_run(is_large ? digester->pool : NULL, add_share, &job,
                 (job.count - 1) / job.share + 1);
    for (int lane = 0; lane < MLS_DIGEST_LANES; lane++) {
        sum->lanes[lane] += atomic_load(&job.lanes[lane]);
    }
    return MLS_OK;
}
