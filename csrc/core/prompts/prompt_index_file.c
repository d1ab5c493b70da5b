/* prompt_index_file: the entries of a log in one file, so that opening need not read all
 * headers.
 *
 * After the head: put (8 bytes), clock, number of segments, number of entries, checksum
 * of all this and of what follows (4 each); 24 bytes for each segment; 44 for each entry.
 */
#include "prompts/prompt_log_state.h"

#include "base/memory.h"
#include "base/size.h"
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    COUNTS = MLS_PROMPT_FILE_HEAD,
    TABLES = COUNTS + 24,
    SEGMENT_BYTES = 24,
    ENTRY_BYTES = 44,
    MODE = 0666
};

static const char letters[] = "mlspridx";

static bool compute_length(size_t segments, size_t entries, size_t *out)
{
    size_t a, b;
    return mls_size_mul(segments, SEGMENT_BYTES, &a) &&
           mls_size_mul(entries, ENTRY_BYTES, &b) && mls_size_add(a, b, &a) &&
           mls_size_add(a, TABLES, out);
}

static uint32_t checksum(const unsigned char *data, size_t bytes,
                         const mls_crc_kernels *crc)
{
    const uint32_t counts = crc->update(0, data + COUNTS, TABLES - COUNTS - 4);
    return crc->update(counts, data + TABLES, bytes - TABLES);
}

/* ---- writing ---- */

static unsigned char *write_segments(const mls_prompt_log *log, unsigned char *out)
{
    for (size_t i = 0; i < log->segment_count; i++, out += SEGMENT_BYTES) {
        const mls_prompt_segment *segment = &log->segments[i];
        mls_store_le32(out, segment->number);
        mls_store_le32(out + 4, segment->last_crc);
        mls_store_le64(out + 8, segment->bytes);
        mls_store_le64(out + 16, segment->last);
    }
    return out;
}

static void write_entries(const mls_prompt_index *index, unsigned char *out)
{
    for (size_t i = 0; i < index->count; i++, out += ENTRY_BYTES) {
        const mls_prompt_entry *entry = &index->entries[i];
        memcpy(out, entry->key.bytes, MLS_PROMPT_KEY);
        mls_store_le32(out + 16, entry->segment);
        mls_store_le32(out + 20, entry->place);
        mls_store_le32(out + 24, entry->units);
        mls_store_le32(out + 28, entry->used);
        mls_store_le32(out + 32, entry->parent);
        mls_store_le32(out + 36, entry->end);
        mls_store_le32(out + 40, (uint32_t)(entry->kind | entry->flags << 8));
    }
}

mls_code mls_prompt_index_save(mls_prompt_log *log, mls_status *st)
{
    struct stat info;
    size_t bytes;
    if (fstatat(log->folder, MLS_PROMPT_INDEX, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
        !S_ISREG(info.st_mode)) {
        return mls_fail(st, MLS_E_FORMAT, "`index` is not a regular file: delete it");
    }
    mls_code code = mls_prompt_index_pack(&log->index, st);
    if (code != MLS_OK) {
        return code;
    }
    if (!compute_length(log->segment_count, log->index.count, &bytes)) {
        return mls_fail(st, MLS_E_SIZE, "the index is too large");
    }
    unsigned char *data = mls_alloc(bytes, 1);
    if (data == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory for an index of %zu bytes", bytes);
    } else {
        mls_prompt_head head = {0};
        memcpy(head.id, log->id, sizeof head.id);
        mls_prompt_head_write(data, letters, &head, log->crc);
        mls_store_le64(data + COUNTS, log->put);
        mls_store_le32(data + COUNTS + 8, log->clock);
        mls_store_le32(data + COUNTS + 12, (uint32_t)log->segment_count);
        mls_store_le32(data + COUNTS + 16, (uint32_t)log->index.count);
        write_entries(&log->index, write_segments(log, data + TABLES));
        mls_store_le32(data + TABLES - 4, checksum(data, bytes, log->crc));
        code = mls_file_replace_at(log->folder, MLS_PROMPT_INDEX, MODE, data, bytes, st);
    }
    mls_free(data);
    if (code == MLS_OK) {
        log->unindexed = 0;
        log->index_bytes = bytes;
    }
    return code;
}

/* ---- reading ---- */

/* Return the content of the file, or NULL. */
static unsigned char *read_file(const mls_prompt_log *log, size_t *bytes)
{
    int fd = -1;
    uint64_t length = 0;
    mls_status ignored;
    if (mls_file_open_at(log->folder, MLS_PROMPT_INDEX, false, &fd, &length, &ignored) !=
        MLS_OK) {
        return NULL;
    }
    unsigned char *data = length < TABLES || !mls_size_from_u64(length, bytes)
                              ? NULL
                              : mls_alloc(*bytes, 1);
    if (data != NULL && mls_file_read_at(fd, data, *bytes, 0, &ignored) != MLS_OK) {
        mls_free(data);
        data = NULL;
    }
    (void)close(fd);
    return data;
}

static bool is_valid(const mls_prompt_log *log, const unsigned char *data, size_t bytes)
{
    mls_prompt_head head;
    mls_status ignored;
    size_t expected;
    return mls_prompt_head_parse(data, letters, log->crc, &head, &ignored) == MLS_OK &&
           memcmp(head.id, log->id, sizeof head.id) == 0 &&
           compute_length(mls_load_le32(data + COUNTS + 12),
                          mls_load_le32(data + COUNTS + 16), &expected) &&
           expected == bytes &&
           checksum(data, bytes, log->crc) == mls_load_le32(data + TABLES - 4);
}

/* Only the newest segment changes: it may have been cut, and become long again. */
static bool newest_is_same(mls_prompt_log *log)
{
    mls_prompt_file *file = NULL;
    mls_status ignored;
    if (log->segment_count == 0) {
        return true;
    }
    mls_prompt_segment *newest = &log->segments[log->segment_count - 1];
    const bool is_same =
        mls_prompt_segment_hold(log, newest, &file, &ignored) == MLS_OK &&
        mls_prompt_last_is_same(newest, file->fd);
    mls_prompt_file_release(file);
    return is_same;
}

/* A segment that is gone was compacted after the index was written, or deleted: its
 * records were copied, or are lost. One that is shorter makes the index useless. */
static bool load_segments(mls_prompt_log *log, const unsigned char *at, size_t count)
{
    char name[MLS_PROMPT_NAME];
    struct stat info;
    mls_status ignored;
    uint32_t before = 0;
    for (size_t i = 0; i < count; i++, at += SEGMENT_BYTES) {
        const mls_prompt_segment segment = {.number = mls_load_le32(at),
                                            .last_crc = mls_load_le32(at + 4),
                                            .bytes = mls_load_le64(at + 8),
                                            .last = mls_load_le64(at + 16)};
        if (segment.number <= before || segment.last > segment.bytes ||
            segment.bytes < MLS_PROMPT_FILE_HEAD ||
            segment.bytes % MLS_PROMPT_UNIT != 0) {
            return false;
        }
        before = segment.number;
        if (fstatat(log->folder, mls_prompt_segment_name(name, segment.number), &info,
                    AT_SYMLINK_NOFOLLOW) != 0) {
            if (errno != ENOENT) {
                return false;
            }
            continue;
        }
        if (!S_ISREG(info.st_mode) || (uint64_t)info.st_size < segment.bytes ||
            mls_prompt_segment_add(log, &segment, &ignored) != MLS_OK) {
            return false;
        }
    }
    return newest_is_same(log);
}

static mls_prompt_entry read_entry(const unsigned char *at)
{
    mls_prompt_entry entry = {
        .segment = mls_load_le32(at + 16),
        .place = mls_load_le32(at + 20),
        .units = mls_load_le32(at + 24),
        .used = mls_load_le32(at + 28),
        .parent = mls_load_le32(at + 32),
        .end = mls_load_le32(at + 36),
        .kind = at[40],
        .flags = at[41] & (MLS_PROMPT_REMOVED | MLS_PROMPT_PINNED | MLS_PROMPT_BRANCHES),
    };
    memcpy(entry.key.bytes, at, MLS_PROMPT_KEY);
    return entry;
}

/* Entries keep their numbers, so one whose segment is gone is added and removed. Parents
 * are linked when all entries exist. */
static bool load_entries(mls_prompt_log *log, const unsigned char *at, size_t count)
{
    mls_status ignored;
    if (mls_prompt_index_reserve(&log->index, count, &ignored) != MLS_OK) {
        return false;
    }
    const unsigned char *first = at;
    mls_prompt_segment *segment = NULL;
    for (size_t i = 0; i < count; i++, at += ENTRY_BYTES) {
        mls_prompt_entry entry = read_entry(at);
        const uint64_t end =
            mls_prompt_entry_offset(&entry) + mls_prompt_entry_bytes(&entry);
        if (segment == NULL || segment->number != entry.segment) {
            segment = mls_prompt_segment_find(log, entry.segment);
        }
        const bool is_removed =
            segment == NULL || (entry.flags & MLS_PROMPT_REMOVED) != 0;
        entry.flags &= (uint8_t)~MLS_PROMPT_REMOVED;
        entry.parent = MLS_PROMPT_NONE;
        if ((!is_removed && end > segment->bytes) ||
            mls_prompt_index_add(&log->index, &entry) != i) {
            return false; /* the same key twice, too */
        }
        if (is_removed) {
            mls_prompt_index_remove(&log->index, (uint32_t)i);
        } else {
            segment->live += mls_prompt_entry_bytes(&entry);
        }
    }
    for (size_t i = 0; i < count; i++, first += ENTRY_BYTES) {
        mls_prompt_index_link(&log->index, (uint32_t)i, mls_load_le32(first + 32));
    }
    return true;
}

bool mls_prompt_index_load(mls_prompt_log *log)
{
    size_t bytes = 0;
    unsigned char *data = read_file(log, &bytes);
    bool is_loaded = data != NULL && is_valid(log, data, bytes);
    if (is_loaded) {
        const size_t segments = mls_load_le32(data + COUNTS + 12);
        is_loaded = load_segments(log, data + TABLES, segments) &&
                    load_entries(log, data + TABLES + segments * SEGMENT_BYTES,
                                 mls_load_le32(data + COUNTS + 16));
    }
    if (is_loaded) {
        log->put = mls_load_le64(data + COUNTS);
        log->clock = mls_load_le32(data + COUNTS + 8);
        log->index_bytes = bytes;
        log->highest =
            log->segment_count > 0 ? log->segments[log->segment_count - 1].number : 0;
    } else {
        mls_prompt_log_clear(log);
    }
    mls_free(data);
    return is_loaded;
}
