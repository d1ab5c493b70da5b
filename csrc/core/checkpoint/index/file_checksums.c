/* file_checksums: compares files of other programs with their recorded sizes and
 * checksums, and adds these to an index.
 *
 * The tensors of an index borrow nothing from the records.
 *
 * A record divides its file into parts: the header, with its length field, and each
 * tensor. A part has a checksum for each block, MLS_SAFETENSORS_BLOCK bytes; its last
 * block may be shorter. */
#include "checkpoint/index/file_checksums.h"

#include "base/memory.h"
#include "base/search.h"
#include "base/size.h"
#include "io/file.h"
#include "safetensors/safetensors.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { LENGTH_BYTES = 8 }; /* length field before a header */

/* Return the offset at which part `part` of the file ends: where the next one starts, or
 * the end of the file. */
static uint64_t part_end(const mls_file_checksums *record, size_t part)
{
    return part + 1 < record->count ? record->starts[part + 1] : record->bytes;
}

/* Report that the parts of record `record` do not cover its file. Returns MLS_E_FORMAT.
 */
static mls_code fail_parts(const mls_file_checksums *record, mls_status *st)
{
    return mls_fail(st, MLS_E_FORMAT, "its checksums do not cover its %llu bytes",
                    (unsigned long long)record->bytes);
}

/* Count the blocks of all parts: `blocks_before[i]` receives the number of blocks before
 * part i, so `blocks_before` needs room for `record->count` elements. MLS_E_FORMAT: the
 * parts do not cover the file in order, or a block lacks its checksum. */
static mls_code count_blocks(const mls_file_checksums *record, size_t *blocks_before,
                             mls_status *st)
{
    uint64_t blocks = 0; /* cannot wrap: a block has at least one byte */
    for (size_t i = 0; i < record->count; i++) {
        const uint64_t end = part_end(record, i);
        if (record->starts[i] >= end || end > record->bytes ||
            (i == 0 && record->starts[0] != 0)) {
            return fail_parts(record, st);
        }
        blocks_before[i] = (size_t)blocks;
        blocks += (end - record->starts[i] - 1) / MLS_SAFETENSORS_BLOCK + 1;
        if (blocks > record->crc_count) {
            return fail_parts(record, st);
        }
    }
    return blocks == record->crc_count ? MLS_OK : fail_parts(record, st);
}

/* Report a changed header; `offset` is the damaged block's offset in the file. Returns
 * MLS_E_CHECKSUM. */
static mls_code fail_header(uint64_t offset, mls_status *st)
{
    mls_fail(st, MLS_E_CHECKSUM,
             "its header has changed since its checksums were written");
    st->has_offset = true;
    st->offset = offset;
    return MLS_E_CHECKSUM;
}

/* Read the header, part 0 of record `record`, from `fd` and compare its blocks with the
 * record. `block` is scratch memory for one block. MLS_E_CHECKSUM: a block differs.
 * MLS_E_FORMAT: part 0 is not the length field with the header. */
static mls_code compare_header(int fd, const mls_file_checksums *record,
                               const mls_crc_kernels *crc, unsigned char *block,
                               mls_status *st)
{
    const uint64_t end = part_end(record, 0);
    for (uint64_t at = 0; at < end; at += MLS_SAFETENSORS_BLOCK) {
        const uint64_t left = end - at;
        const size_t length =
            left < MLS_SAFETENSORS_BLOCK ? (size_t)left : MLS_SAFETENSORS_BLOCK;
        const mls_code code = mls_file_read_at(fd, block, length, at, st);
        if (code != MLS_OK) {
            return code;
        }
        if (crc->update(0, block, length) != record->crcs[at / MLS_SAFETENSORS_BLOCK]) {
            return fail_header(at, st);
        }
        if (at == 0 &&
            (end < LENGTH_BYTES || mls_load_le64(block) != end - LENGTH_BYTES)) {
            return mls_fail(st, MLS_E_FORMAT,
                            "its checksums are not those of a header and tensors: write "
                            "them again");
        }
    }
    return MLS_OK;
}

/* Report that the file now has `bytes` bytes, which differs from its record. Returns
 * MLS_E_FORMAT. */
static mls_code fail_size(uint64_t bytes, const mls_file_checksums *record,
                          mls_status *st)
{
    mls_fail(st, MLS_E_FORMAT,
             "the file has changed since its checksums were written: it has %llu bytes, "
             "and had %llu",
             (unsigned long long)bytes, (unsigned long long)record->bytes);
    mls_status_expected(st, "%llu", (unsigned long long)record->bytes);
    return mls_status_got(st, "%llu", (unsigned long long)bytes);
}

/* Compare the size and the header of the file `name` in `folder` with its record
 * `record`. The bytes of tensors are not read. `block` is scratch memory for one block.
 * MLS_E_FORMAT: the size differs, or the record's parts do not cover the file;
 * MLS_E_CHECKSUM: the header differs; MLS_E_IO, MLS_E_MEMORY. */
static mls_code compare_file(const char *folder, const char *name,
                             const mls_file_checksums *record, const mls_crc_kernels *crc,
                             unsigned char *block, mls_status *st)
{
    int fd;
    uint64_t bytes;
    const size_t length = strlen(folder) + strlen(name) + 2;
    char *path = mls_alloc(length, 1);
    size_t *blocks_before = mls_alloc(record->count, sizeof *blocks_before);
    mls_code code = MLS_OK;
    if (path == NULL || blocks_before == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory for %zu parts", record->count);
    } else if ((code = count_blocks(record, blocks_before, st)) == MLS_OK) {
        snprintf(path, length, "%s/%s", folder, name);
        code = mls_file_open(path, &fd, &bytes, st);
        if (code == MLS_OK) {
            code = bytes == record->bytes ? compare_header(fd, record, crc, block, st)
                                          : fail_size(bytes, record, st);
            (void)close(fd);
        }
    }
    mls_free(blocks_before);
    mls_free(path);
    return code;
}

/* Compare each file that has a record; a record without parts means that no checksums
 * were written for the file. */
mls_code mls_file_checksums_compare(const mls_file_checksums *records, const char *folder,
                                    const char *const *names, size_t count,
                                    const mls_crc_kernels *crc, size_t *failed,
                                    mls_status *st)
{
    unsigned char *block = mls_alloc(MLS_SAFETENSORS_BLOCK, 1);
    mls_code code =
        block != NULL ? MLS_OK : mls_fail(st, MLS_E_MEMORY, "no memory for a block");
    *failed = 0;
    for (size_t i = 0; code == MLS_OK && i < count; i++) {
        *failed = i;
        if (records[i].count > 0) {
            code = compare_file(folder, names[i], &records[i], crc, block, st);
        }
    }
    mls_free(block);
    return code;
}

/* Return the index of the part of `record` that has exactly the bytes of `shard`, or
 * SIZE_MAX. */
static size_t find_part(const mls_file_checksums *record, const mls_index_shard *shard)
{
    size_t at;
    MLS_FIND_FIRST(at, record->count, record->starts[at] >= shard->offset);
    return at < record->count && record->starts[at] == shard->offset &&
                   part_end(record, at) - record->starts[at] == shard->bytes
               ? at
               : SIZE_MAX;
}

/* Check that each tensor that has bytes and a record is exactly one part of its record.
 * Nothing is changed, so that a failure leaves the index as it was. On failure `*failed`
 * is the number of the file. MLS_E_FORMAT. */
static mls_code compare_tensors(const mls_index *index, const mls_file_checksums *records,
                                size_t *failed, mls_status *st)
{
    for (size_t i = 0; i < index->shard_count; i++) {
        const mls_index_shard *shard = &index->shards[i];
        const mls_file_checksums *record = &records[shard->file];
        if (record->count > 0 && shard->bytes > 0 &&
            find_part(record, shard) == SIZE_MAX) {
            *failed = shard->file;
            mls_fail(st, MLS_E_FORMAT,
                     "its checksums are not those of this tensor: write them again");
            return mls_status_name(st, shard->id.name.data, shard->id.name.length);
        }
    }
    return MLS_OK;
}

/* Copy the checksums of all tensors to `crcs`, which the caller makes the index's array;
 * the old one is freed. They come from a file's record, otherwise from its header. A
 * tensor with neither keeps none. `blocks_before[file][part]` is the number of blocks
 * before a part. */
static void use_records(mls_index *index, const mls_file_checksums *records,
                        const size_t *const *blocks_before, uint32_t *crcs)
{
    for (size_t i = 0; i < index->shard_count; i++) {
        mls_index_shard *shard = &index->shards[i];
        const mls_file_checksums *record = &records[shard->file];
        const size_t blocks = mls_safetensors_blocks(shard->bytes);
        const uint32_t *from = shard->crcs;
        if (record->count > 0) {
            from =
                record->crcs +
                (blocks == 0 ? 0 : blocks_before[shard->file][find_part(record, shard)]);
        }
        if (from == NULL) {
            continue;
        }
        memcpy(crcs, from, blocks * sizeof *crcs);
        shard->crcs = crcs;
        shard->crc = mls_safetensors_join_crcs(crcs, shard->bytes);
        crcs += blocks;
    }
    for (size_t i = 0; i < index->copy_count; i++) {
        index->shards[index->shard_count + i].crcs = NULL; /* they are freed */
    }
    mls_free(index->crcs);
}

/* For each file with a record, set `blocks_before[file]` to a new array: the number of
 * blocks before each part. Otherwise it stays NULL. On failure `*failed` is the number of
 * the file, and the caller frees the arrays. MLS_E_FORMAT: the file's size is not the
 * recorded one, or the record's parts do not cover the file. MLS_E_MEMORY. */
static mls_code number_blocks(const mls_index *index, const mls_file_checksums *records,
                              size_t **blocks_before, size_t *failed, mls_status *st)
{
    for (size_t i = 0; i < index->file_count; i++) {
        const mls_file_checksums *record = &records[i];
        *failed = i;
        if (record->count == 0) {
            continue;
        }
        blocks_before[i] = mls_alloc(record->count, sizeof *blocks_before[i]);
        if (blocks_before[i] == NULL) {
            return mls_fail(st, MLS_E_MEMORY, "no memory for %zu parts", record->count);
        }
        const mls_code code = index->files[i].bytes == record->bytes
                                  ? count_blocks(record, blocks_before[i], st)
                                  : fail_size(index->files[i].bytes, record, st);
        if (code != MLS_OK) {
            return code;
        }
    }
    return MLS_OK;
}

/* Attach the records' checksums to the tensors. All that can fail comes before the first
 * change, so that a failure leaves the index as it was. */
mls_code mls_index_use_checksums(mls_index *index, const mls_file_checksums *records,
                                 size_t *failed, mls_status *st)
{
    size_t blocks = 0; /* cannot wrap: the files have at least as many bytes */
    for (size_t i = 0; i < index->shard_count; i++) {
        blocks += mls_safetensors_blocks(index->shards[i].bytes);
    }
    *failed = 0;
    uint32_t *crcs = mls_alloc(blocks, sizeof *crcs);
    size_t **blocks_before = mls_alloc(index->file_count, sizeof *blocks_before);
    mls_code code =
        crcs != NULL && blocks_before != NULL
            ? number_blocks(index, records, blocks_before, failed, st)
            : mls_fail(st, MLS_E_MEMORY, "no memory for %zu checksums", blocks);
    code = code == MLS_OK ? compare_tensors(index, records, failed, st) : code;
    if (code == MLS_OK) {
        use_records(index, records, (const size_t *const *)blocks_before, crcs);
        index->crcs = crcs;
        crcs = NULL;
    }
    for (size_t i = 0; blocks_before != NULL && i < index->file_count; i++) {
        mls_free(blocks_before[i]);
    }
    mls_free((void *)blocks_before);
    mls_free(crcs);
    return code;
}
