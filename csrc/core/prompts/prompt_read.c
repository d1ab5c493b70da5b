/* prompt_read: reads the payload of matched records into arrays, and compares its
 * checksums.
 *
 * Bytes are read to their destination in steps that stay in the cache, and checksummed
 * there. Destinations with short runs get copies of such steps.
 */
#include "prompts/prompt_log_state.h"

#include "array/copy/pack_range.h"
#include "base/memory.h"
#include "base/size.h"
#include "io/file.h"
#include "prompts/payload_runs.h"

#include <stdio.h>
#include <string.h>
#include <sys/uio.h>

enum {
    STEP = 256 << 10, /* bytes of one system call */
    VECTORS = 64      /* ranges of memory of one system call */
};

/* One call of mls_prompt_read. */
typedef struct read_work {
    const mls_prompt_match *match;
    mls_prompt_request *requests;
    const mls_kernels *kernels;
    const mls_crc_kernels *crc;
    const mls_progress *progress;
    atomic_bool is_stopped;
} read_work;

/* Position in a part that is read. */
typedef struct part_reader {
    int fd;
    uint64_t offset; /* of the next byte in the file */
    uint32_t crc;    /* of the bytes until now */
    const mls_crc_kernels *crc_kernels;
} part_reader;

/* Read the next `bytes` bytes of the part into `count` vectors, which have as many, and
 * add them to the checksum. After a short or failed call, each vector is read again.
 * MLS_E_IO; MLS_E_FORMAT: the file ends earlier. */
static mls_code read_vectors(part_reader *r, struct iovec *vectors, int count,
                             size_t bytes, mls_status *st)
{
    const bool is_whole =
        preadv(r->fd, vectors, count, (off_t)r->offset) == (ssize_t)bytes;
    for (int i = 0; i < count; i++) {
        unsigned char *to = vectors[i].iov_base;
        const size_t length = vectors[i].iov_len;
        const mls_code code =
            is_whole ? MLS_OK : mls_file_read_at(r->fd, to, length, r->offset, st);
        if (code != MLS_OK) {
            return code;
        }
        r->offset += length;
        r->crc = r->crc_kernels->update(r->crc, to, length);
    }
    return MLS_OK;
}

/* Read the bytes of a part into all runs of a view, several in one system call. Errors as
 * read_vectors. */
static mls_code read_runs(part_reader *r, mls_payload_runs *runs, mls_status *st)
{
    struct iovec vectors[VECTORS];
    int count = 0;
    size_t bytes = 0;
    mls_code code = MLS_OK;
    for (unsigned char *run;
         code == MLS_OK && (run = mls_payload_runs_next(runs)) != NULL;) {
        for (size_t at = 0; code == MLS_OK && at < runs->bytes;) {
            const size_t step = mls_size_least(runs->bytes - at, STEP - bytes);
            vectors[count++] = (struct iovec){.iov_base = run + at, .iov_len = step};
            at += step;
            bytes += step;
            if (bytes == STEP || count == VECTORS) {
                code = read_vectors(r, vectors, count, bytes, st);
                count = 0;
                bytes = 0;
            }
        }
    }
    return code == MLS_OK && count > 0 ? read_vectors(r, vectors, count, bytes, st)
                                       : code;
}

/* Read `bytes` bytes of a part to a temporary block, step by step, and copy them to the
 * view `into`.
 * MLS_E_MEMORY, and the errors of read_vectors. */
static mls_code read_packed(part_reader *r, const mls_tensor *into,
                            const mls_kernels *kernels, size_t bytes, mls_status *st)
{
    const size_t item = mls_tensor_item_bytes(into), step = STEP / item;
    unsigned char *packed = mls_alloc(mls_size_least(bytes, STEP), 1);
    mls_code code = MLS_OK;
    if (packed == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to read %zu bytes", bytes);
    }
    for (size_t at = 0; code == MLS_OK && at < bytes / item; at += step) {
        const size_t count = mls_size_least(step, bytes / item - at);
        struct iovec vector = {.iov_base = packed, .iov_len = count * item};
        code = read_vectors(r, &vector, 1, vector.iov_len, st);
        if (code == MLS_OK) {
            mls_unpack_range(kernels, into, at, count, packed);
        }
    }
    mls_free(packed);
    return code;
}

/* Read a piece of a part, and verify the part after its last piece. The parts of a record
 * are adjacent, so the lengths of earlier parts give the start. */
mls_code mls_prompt_read_piece(const mls_prompt_match *match,
                               const mls_prompt_request *request, uint64_t offset,
                               const mls_kernels *kernels, const mls_crc_kernels *crc,
                               uint32_t *sum, mls_status *st)
{
    const mls_prompt_hit *hit = &match->hits[request->hit];
    const mls_prompt_part part = mls_prompt_header_part(&hit->header, request->part);
    part_reader r = {.fd = hit->file->fd, .crc = *sum, .crc_kernels = crc};
    mls_payload_runs runs;
    size_t bytes = 0;
    uint64_t start = hit->offset + hit->header.header_bytes;
    for (size_t i = 0; i < request->part; i++) {
        start += mls_prompt_header_part(&hit->header, i).bytes;
    }
    r.offset = start + offset;
    (void)mls_tensor_bytes(&request->into, &bytes); /* at most those of the part */
    mls_payload_runs_init(&runs, &request->into);
    const mls_code code = bytes == 0 || mls_payload_runs_are_long(&runs)
                              ? read_runs(&r, &runs, st)
                              : read_packed(&r, &request->into, kernels, bytes, st);
    *sum = r.crc;
    if (code == MLS_OK && offset + bytes == part.bytes && r.crc != part.crc) {
        return mls_fail(st, MLS_E_CHECKSUM,
                        "the %llu bytes at offset %llu are damaged: checksum %08x "
                        "instead of %08x",
                        (unsigned long long)part.bytes, (unsigned long long)start,
                        (unsigned)r.crc, (unsigned)part.crc);
    }
    return code;
}

/* Read the part of request number `index`, as a task for the pool; `context` is the
 * read_work. Skips the request after a stop. */
static void read_task(void *context, size_t index)
{
    read_work *work = context;
    mls_prompt_request *request = &work->requests[index];
    mls_status st = {.text = ""};
    uint32_t sum = 0;
    if (atomic_load_explicit(&work->is_stopped, memory_order_relaxed)) {
        return;
    }
    request->code = mls_prompt_read_piece(work->match, request, 0, work->kernels,
                                          work->crc, &sum, &st);
    request->os_error = st.os_error;
    snprintf(request->text, sizeof request->text, "%s", st.text);
    const mls_prompt_hit *hit = &work->match->hits[request->hit];
    const uint64_t bytes = mls_prompt_header_part(&hit->header, request->part).bytes;
    if (!mls_progress_report(work->progress, bytes)) {
        atomic_store_explicit(&work->is_stopped, true, memory_order_relaxed);
    }
}

/* Fail with the first error of a request that is not damage (MLS_E_MEMORY, MLS_E_IO), if
 * there is one. */
static mls_code find_error(const mls_prompt_match *match,
                           const mls_prompt_request *requests, size_t count,
                           mls_status *st)
{
    for (size_t i = 0; i < count; i++) {
        if (requests[i].code == MLS_E_MEMORY) {
            return mls_fail(st, MLS_E_MEMORY, "%s", requests[i].text);
        }
        if (requests[i].code == MLS_E_IO) {
            return mls_fail_os(
                st, requests[i].os_error,
                "cannot read the record at offset %llu of " MLS_PROMPT_SEGMENT,
                (unsigned long long)match->hits[requests[i].hit].offset,
                (unsigned)match->hits[requests[i].hit].segment);
        }
    }
    return MLS_OK;
}

/* Read and verify parts. One task reads one part. All results are examined at the end, in
 * the order of the requests, so that the error does not depend on the threads. */
mls_code mls_prompt_read(const mls_prompt_match *match, mls_prompt_request *requests,
                         size_t count, const mls_kernels *kernels,
                         const mls_crc_kernels *crc, mls_pool *pool,
                         const mls_progress *progress, mls_status *st)
{
    read_work work = {.match = match,
                      .requests = requests,
                      .kernels = kernels,
                      .crc = crc,
                      .progress = progress};
    atomic_init(&work.is_stopped, false);
    mls_pool_run(pool, read_task, &work, count);
    return atomic_load(&work.is_stopped) ? mls_fail(st, MLS_E_STOPPED, "stopped")
                                         : find_error(match, requests, count, st);
}
