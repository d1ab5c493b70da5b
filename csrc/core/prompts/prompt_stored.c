/* prompt_stored: reads one record's header from a segment, finds the next valid header,
 * checks a payload. */
#include "prompts/prompt_log_state.h"

#include "base/memory.h"
#include "base/size.h"
#include "io/file.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

enum { WINDOW = 64 << 10 }; /* bytes that a search reads at once */

/* ---- headers ---- */

static mls_code fail_cut(mls_status *st)
{
    return mls_fail(st, MLS_E_FORMAT, "the header of a record is cut off");
}

/* Read and parse the header of a record. Most headers fit into the first read; a longer
 * one is read again as a whole. */
mls_code mls_prompt_header_read(int fd, uint64_t offset, uint64_t left,
                                const mls_crc_kernels *crc, unsigned char *header_buffer,
                                size_t room, unsigned char **bytes,
                                mls_prompt_header *out, mls_status *st)
{
    const size_t first = left < room ? (size_t)left : room;
    *bytes = header_buffer;
    mls_code code = mls_file_read_at(fd, header_buffer, first, offset, st);
    if (code == MLS_OK) {
        code = mls_prompt_header_parse(header_buffer, first, left, crc, out, st);
    }
    if (code != MLS_E_CAPACITY) {
        return code;
    }
    const size_t length = out->header_bytes;
    if (length > left) {
        return fail_cut(st);
    }
    unsigned char *longer = mls_alloc(length, 1);
    if (longer == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a header of %zu bytes", length);
    }
    code = mls_file_read_at(fd, longer, length, offset, st);
    if (code == MLS_OK) {
        code = mls_prompt_header_parse(longer, length, left, crc, out, st);
    }
    if (code != MLS_OK) {
        mls_free(longer);
        return code == MLS_E_CAPACITY ? fail_cut(st) : code; /* it became longer */
    }
    *bytes = longer;
    return MLS_OK;
}

/* ---- after damage ---- */

/* Return MLS_OK if a valid header is at `offset`; a window has its first `bytes` bytes at
 * `data`. `left` as in mls_prompt_header_read. An invalid long one reduces `*effort`; if
 * it needs more, it counts as damaged unread. Other errors as mls_prompt_header_read. */
static mls_code examine_place(int fd, uint64_t offset, uint64_t left,
                              const unsigned char *data, size_t bytes,
                              const mls_crc_kernels *crc, uint64_t *effort,
                              mls_status *st)
{
    unsigned char header_buffer[MLS_PROMPT_HEAD_READ], *longer;
    mls_prompt_header header;
    mls_code code = mls_prompt_header_parse(data, bytes, left, crc, &header, st);
    if (code != MLS_E_CAPACITY) {
        return code;
    }
    const size_t length = header.header_bytes;
    const bool is_long = length > MLS_PROMPT_HEAD_READ;
    if (is_long && length > *effort) {
        return MLS_E_CHECKSUM;
    }
    code = mls_prompt_header_read(fd, offset, left, crc, header_buffer,
                                  MLS_PROMPT_HEAD_READ, &longer, &header, st);
    if (longer != header_buffer) {
        mls_free(longer);
    }
    *effort -= code != MLS_OK && is_long ? length : 0;
    return code;
}

mls_code mls_prompt_damage_add(mls_prompt_damage_list *list, uint32_t segment,
                               uint64_t offset, const char *text, mls_status *st)
{
    mls_prompt_damage *damage =
        mls_grow(list->damage, list->count, &list->room, sizeof *damage);
    if (damage == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to report damage");
    }
    list->damage = damage;
    damage[list->count] = (mls_prompt_damage){.segment = segment, .offset = offset};
    snprintf(damage[list->count].text, sizeof damage[list->count].text, "%s",
             text != NULL ? text
             : offset == 0
                 ? "the first 64 bytes are damaged"
                 : "a header is damaged, or its put was killed: the record is lost");
    list->count++;
    return MLS_OK;
}

mls_code mls_prompt_damage_add_record(mls_prompt_damage_list *list,
                                      const mls_prompt_entry *entry, const char *text,
                                      mls_status *st)
{
    char whole[MLS_TEXT_BYTES];
    const bool is_pinned = (entry->flags & MLS_PROMPT_PINNED) != 0;
    snprintf(whole, sizeof whole, "%.*s%s", MLS_TEXT_BYTES / 2, text,
             is_pinned ? "; it was pinned: pin it again" : "");
    return mls_prompt_damage_add(list, entry->segment, mls_prompt_entry_offset(entry),
                                 whole, st);
}

bool mls_prompt_is_unfinished(int fd, uint64_t offset)
{
    static const unsigned char empty[MLS_PROMPT_FIXED];
    unsigned char bytes[MLS_PROMPT_FIXED];
    mls_status ignored;
    return mls_file_read_at(fd, bytes, sizeof bytes, offset, &ignored) != MLS_OK ||
           memcmp(bytes, empty, sizeof empty) == 0;
}

/* Return the first place from `at` on, in steps of the unit, that may have data; `end` if
 * there is only a hole, which has no header. */
static uint64_t skip_hole(int fd, uint64_t at, uint64_t end)
{
#ifdef SEEK_DATA
    const off_t data = lseek(fd, (off_t)at, SEEK_DATA);
    if (data < 0) {
        return errno == ENXIO ? end : at; /* other file systems do not know holes */
    }
    if ((uint64_t)data > at) {
        at += ((uint64_t)data - at) / MLS_PROMPT_UNIT * MLS_PROMPT_UNIT;
    }
#else
    (void)fd;
#endif
    return at < end ? at : end;
}

/* Find the first valid header from `from` on. Examine each multiple of the unit; most of
 * them lack the magic number. The first window is small, since valid records and damage
 * may alternate, and each next one is twice as large. `*effort`: bytes of invalid
 * long headers that may still be read. */
mls_code mls_prompt_header_search(int fd, uint64_t from, uint64_t end,
                                  const mls_crc_kernels *crc, uint64_t *effort,
                                  const mls_progress *progress, uint64_t *out,
                                  mls_status *st)
{
    unsigned char window[WINDOW];
    size_t step = MLS_PROMPT_HEAD_READ;
    *out = 0;
    for (uint64_t at = from; at < end && end - at >= MLS_PROMPT_FIXED;
         at += step - MLS_PROMPT_UNIT) { /* a place needs MLS_PROMPT_FIXED bytes */
        if (!mls_progress_report(progress, 0)) {
            return mls_fail(st, MLS_E_STOPPED, "stopped");
        }
        at = skip_hole(fd, at, end);
        if (end - at < MLS_PROMPT_FIXED) {
            break;
        }
        step = at == from || step == WINDOW ? step : 2 * step;
        step = end - at < step ? (size_t)(end - at) : step;
        mls_code code = mls_file_read_at(fd, window, step, at, st);
        if (code != MLS_OK) { /* the writer may cut the file meanwhile */
            return code == MLS_E_FORMAT ? MLS_OK : code;
        }
        for (size_t i = 0; i + MLS_PROMPT_FIXED <= step; i += MLS_PROMPT_UNIT) {
            if (!mls_prompt_header_begins(window + i)) {
                continue;
            }
            code = examine_place(fd, at + i, end - at - i, window + i, step - i, crc,
                                 effort, st);
            if (code == MLS_E_IO || code == MLS_E_MEMORY) {
                return code;
            }
            if (code == MLS_OK) {
                *out = at + i;
                return MLS_OK;
            }
        }
    }
    return MLS_OK;
}

/* ---- one payload ---- */

/* Compare the payload of a record with its checksums. The parts follow the header without
 * gaps. */
mls_code mls_prompt_payload_check(int fd, uint64_t offset,
                                  const mls_prompt_header *header,
                                  const mls_crc_kernels *crc, unsigned char *buffer,
                                  size_t buffer_bytes, const mls_progress *progress,
                                  mls_status *st)
{
    offset += header->header_bytes;
    for (size_t i = 0; i < header->part_count; i++) {
        const mls_prompt_part part = mls_prompt_header_part(header, i);
        uint32_t sum = 0;
        for (uint64_t at = 0; at < part.bytes;) {
            const uint64_t left = part.bytes - at;
            const size_t step = left < buffer_bytes ? (size_t)left : buffer_bytes;
            const mls_code code = mls_file_read_at(fd, buffer, step, offset + at, st);
            if (code != MLS_OK) {
                return code;
            }
            sum = crc->update(sum, buffer, step);
            at += step;
            if (!mls_progress_report(progress, step)) {
                return mls_fail(st, MLS_E_STOPPED, "stopped");
            }
        }
        if (sum != part.crc) {
            return mls_fail(st, MLS_E_CHECKSUM, "part %zu of a record is damaged", i);
        }
        offset += part.bytes;
    }
    return MLS_OK;
}

/* ---- the last record ---- */

/* Return whether the last record that the log knows is unchanged. Compare the checksum in
 * the record's header, 4 bytes behind its magic number. */
bool mls_prompt_last_is_same(const mls_prompt_segment *segment, int fd)
{
    unsigned char bytes[4];
    mls_status ignored;
    return segment->last == 0 ||
           (mls_file_read_at(fd, bytes, sizeof bytes, segment->last + 4, &ignored) ==
                MLS_OK &&
            mls_load_le32(bytes) == segment->last_crc);
}
