/* safetensors_tensors_read: reads all tensors of a file, and compares their checksums.
 *
 * The tensors are divided into parts, which threads take in order. If parts fail, the
 * first one is read again by the calling thread to report its error, so that the error
 * does not depend on the number of threads. */
#include "safetensors/safetensors.h"

#include "base/memory.h"
#include "io/file.h"
#include "io/json_checksum.h"

#include <stdatomic.h>
#include <stdint.h>

enum {
    SHOWN_NAME = 100,      /* bytes of a name in a message */
    READ_STEP = 256 << 10, /* small enough to stay cached between reading and checksum */
    PART = 4 << 20,        /* a multiple of the block size, large enough to hand out */
    SHARED_BYTES = 8 << 20 /* below this, the calling thread reads alone */
};

/* Fail with MLS_E_CHECKSUM, the tensor's name and the file offset, because the block at
 * byte `start` of the tensor has the checksum `checksum` instead of `expected`. */
static mls_code fail_block(const mls_stored *tensor, size_t start, uint32_t checksum,
                           uint32_t expected, mls_status *st)
{
    const size_t left = tensor->bytes - start;
    const size_t length = left < MLS_SAFETENSORS_BLOCK ? left : MLS_SAFETENSORS_BLOCK;
    const uint64_t offset = tensor->offset + start;
    const int width =
        (int)(tensor->name.length < SHOWN_NAME ? tensor->name.length : SHOWN_NAME);
    mls_fail(st, MLS_E_CHECKSUM,
             "tensor '%.*s': its bytes have changed since they were written (checksum "
             "%08lx, "
             "expected %08lx, in bytes %llu to %llu of the file): the file is damaged",
             width, tensor->name.data, (unsigned long)checksum, (unsigned long)expected,
             (unsigned long long)offset, (unsigned long long)(offset + length));
    st->has_offset = true;
    st->offset = offset;
    mls_status_name(st, tensor->name.data, tensor->name.length);
    mls_status_expected(st, "%08lx", (unsigned long)expected);
    return mls_status_got(st, "%08lx", (unsigned long)checksum);
}

/* Read the block at byte `start` of the tensor to `to`, and compare it with its checksum.
 * It is read in parts that stay cached between the system's copy and the checksum, so
 * main memory is read once. MLS_E_IO, MLS_E_FORMAT (the file ends), MLS_E_CHECKSUM. */
static mls_code read_block(int fd, const mls_stored *tensor, size_t start,
                           const mls_crc_kernels *crc, unsigned char *to, mls_status *st)
{
    const size_t left = tensor->bytes - start;
    const size_t length = left < MLS_SAFETENSORS_BLOCK ? left : MLS_SAFETENSORS_BLOCK;
    uint32_t checksum = 0, expected = 0;
    for (size_t done = 0; done < length;) {
        const size_t step = length - done < READ_STEP ? length - done : READ_STEP;
        const mls_code code =
            mls_file_read_at(fd, to + done, step, tensor->offset + start + done, st);
        if (code != MLS_OK) {
            return code;
        }
        checksum = crc->update(checksum, to + done, step);
        done += step;
    }
    /* the digits were checked when the header was read */
    (void)mls_crc_from_digits(
        tensor->block_digits + start / MLS_SAFETENSORS_BLOCK * MLS_CRC_DIGITS, &expected);
    return checksum == expected ? MLS_OK
                                : fail_block(tensor, start, checksum, expected, st);
}

/* Bytes start .. start + length - 1 of a tensor. */
typedef struct part {
    const mls_stored *tensor;
    unsigned char *to; /* destination of byte `start`; NULL: none */
    size_t start, length;
} part;

/* What all tasks of one read share. */
typedef struct read_job {
    int fd;
    const mls_crc_kernels *crc; /* NULL: no checksums to verify */
    const part *parts;
    atomic_size_t failed; /* the first part that has failed, or SIZE_MAX */
} read_job;

/* Read one part of a tensor: block by block with checksums, or with one read without
 * checksums. Adds the tensor's name to a failure. */
static mls_code read_part(const read_job *r, const part *p, mls_status *st)
{
    mls_code code = MLS_OK;
    unsigned char *buffer = NULL;
    if (p->to == NULL) {
        buffer = mls_realloc(NULL, MLS_SAFETENSORS_BLOCK, 1);
        code = buffer == NULL ? mls_fail(st, MLS_E_MEMORY, "no memory to read a block")
                              : MLS_OK;
    } else if (r->crc == NULL) {
        code =
            mls_file_read_at(r->fd, p->to, p->length, p->tensor->offset + p->start, st);
    }
    for (size_t done = 0; r->crc != NULL && code == MLS_OK && done < p->length;
         done += MLS_SAFETENSORS_BLOCK) {
        unsigned char *to = buffer == NULL ? p->to + done : buffer;
        code = read_block(r->fd, p->tensor, p->start + done, r->crc, to, st);
    }
    mls_free(buffer);
    if (code != MLS_OK) {
        mls_status_name(st, p->tensor->name.data, p->tensor->name.length);
    }
    return code;
}

/* Read part number `index`, as a task for the pool; `context` is the read_job. `failed`
 * keeps the lowest number of a failed part, and parts after it are skipped. The error is
 * not kept: a second read finds it again. */
static void read_task(void *context, size_t index)
{
    read_job *r = context;
    mls_status ignored;
    size_t first = atomic_load_explicit(&r->failed, memory_order_relaxed);
    if (index > first || read_part(r, &r->parts[index], &ignored) == MLS_OK) {
        return;
    }
    while (index < first && !atomic_compare_exchange_weak(&r->failed, &first, index)) {
    }
}

/* Return an upper bound of the number of parts of at most PART bytes that make_parts
 * lists for all tensors. It cannot overflow: bytes and tensors limit it. */
static size_t count_parts(const mls_safetensors *file)
{
    size_t count = 0;
    for (size_t i = 0; i < file->count; i++) {
        count += file->tensors[i].bytes / PART + 1;
    }
    return count;
}

/* Divide all tensors into parts of at most PART bytes, one task each, and store them in
 * `parts`, which has room for count_parts. `places[i]` is the buffer of tensor i; without
 * `places` the parts have none. Returns the number of parts, and sets `*bytes` to their
 * total size. */
static size_t make_parts(const mls_safetensors *file, void *const *places, part *parts,
                         uint64_t *bytes)
{
    size_t count = 0;
    *bytes = 0;
    for (size_t i = 0; i < file->count; i++) {
        const mls_stored *tensor = &file->tensors[i];
        for (size_t start = 0; start < tensor->bytes; start += PART) {
            const size_t left = tensor->bytes - start;
            parts[count++] =
                (part){.tensor = tensor,
                       .to = places == NULL ? NULL : (unsigned char *)places[i] + start,
                       .start = start,
                       .length = left < PART ? left : PART};
        }
        *bytes += tensor->bytes;
    }
    return count;
}

/* Read all parts as tasks, and then the first failed one again to report its error. That
 * read may succeed; all parts after it are then read too, since tasks may have skipped
 * them. */
mls_code mls_safetensors_read(int fd, const mls_safetensors *file, void *const *places,
                              const mls_crc_kernels *crc, mls_pool *pool, mls_status *st)
{
    uint64_t bytes;
    part *parts = mls_alloc(count_parts(file), sizeof *parts);
    if (parts == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to read %zu tensors", file->count);
    }
    read_job r = {.fd = fd, .crc = file->has_crc ? crc : NULL, .parts = parts};
    atomic_init(&r.failed, SIZE_MAX);
    const size_t count = make_parts(file, places, parts, &bytes);
    mls_pool_run(bytes >= SHARED_BYTES ? pool : NULL, read_task, &r, count);
    mls_code code = MLS_OK;
    for (size_t i = atomic_load(&r.failed); code == MLS_OK && i < count; i++) {
        code = read_part(&r, &parts[i], st);
    }
    mls_free(parts);
    return code;
}
