/* prompt_stored: read one record of a segment. */
#include "prompts/prompt_log_state.h"

#include "base/memory.h"
#include "io/file.h"

/* ---- headers ---- */

/* Most headers fit into the first read. */
mls_code mls_prompt_header_read(int fd, uint64_t offset, uint64_t left,
                                const mls_crc_kernels *crc, unsigned char *room,
                                unsigned char **bytes, mls_prompt_header *out,
                                mls_status *st)
{
    const size_t first =
        left < MLS_PROMPT_HEAD_READ ? (size_t)left : MLS_PROMPT_HEAD_READ;
    *bytes = room;
    mls_code code = mls_file_read_at(fd, room, first, offset, st);
    if (code == MLS_OK) {
        code = mls_prompt_header_parse(room, first, left, crc, out, st);
    }
    if (code != MLS_E_CAPACITY) {
        return code;
    }
    const size_t length = out->header_bytes;
    if (length > left) {
        return mls_fail(st, MLS_E_FORMAT, "the header of a record is cut off");
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
        return code == MLS_E_CAPACITY ? mls_fail(st, MLS_E_FORMAT, "a header changed")
                                      : code;
    }
    *bytes = longer;
    return MLS_OK;
}

/* ---- one payload ---- */

mls_code mls_prompt_payload_check(int fd, uint64_t offset,
                                  const mls_prompt_header *header,
                                  const mls_crc_kernels *crc, unsigned char *buffer,
                                  size_t room, const mls_progress *progress,
                                  mls_status *st)
{
    offset += header->header_bytes;
    for (size_t i = 0; i < header->part_count; i++) {
        const mls_prompt_part part = mls_prompt_header_part(header, i);
        uint32_t sum = 0;
        for (uint64_t at = 0; at < part.bytes;) {
            const uint64_t left = part.bytes - at;
            const size_t step = left < room ? (size_t)left : room;
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
