/* prompt_logs: a prompt log in the temporary folder, and prompts of small numbers. */
#ifndef MLS_PROMPT_LOGS_H
#define MLS_PROMPT_LOGS_H

#include "base/memory.h"
#include "prompts/prompt_log_state.h"
#include "support/cpus.h"
#include "support/temporary_folder.h"
#include "support/whole_file.h"

#include <sys/stat.h>
#include <unistd.h>

enum { BLOCK = 4, PART_BYTES = 1000, MOST_TOKENS = 64 };

/* A prompt of 64 tokens: `tokens[i]` is i plus a number. */
typedef struct prompt {
    uint32_t tokens[MOST_TOKENS];
} prompt;

static inline prompt prompt_of(uint32_t number)
{
    prompt p;
    for (uint32_t i = 0; i < MOST_TOKENS; i++) {
        p.tokens[i] = 1000 * number + i;
    }
    return p;
}

static inline mls_prompt_prefix prefix_of(const prompt *p, size_t count)
{
    return (mls_prompt_prefix){.fingerprint = (const unsigned char *)"model",
                               .fingerprint_bytes = 5,
                               .tokens = p->tokens,
                               .count = count,
                               .block_tokens = BLOCK};
}

static inline mls_prompt_log *open_log(void)
{
    mls_prompt_log *log = NULL;
    CHECK(mls_prompt_log_open(path_of("log"), true, mls_kernels_of(best_cpu()), NULL,
                              &log, &status) == MLS_OK);
    return log;
}

/* Bytes that differ for each record. */
static inline void fill_part(unsigned char *part, size_t bytes, const prompt *p,
                             size_t end)
{
    for (size_t i = 0; i < bytes; i++) {
        part[i] = (unsigned char)(p->tokens[0] / 1000 + 31 * end + i);
    }
}

/* Store the first `blocks` blocks of a prompt, each with a part of `bytes` bytes, up to
 * PART_BYTES * 100. Returns the number of written records, -1 after an error. */
static inline int put_bytes(mls_prompt_log *log, const prompt *p, size_t blocks,
                            size_t bytes, uint64_t max_bytes)
{
    mls_prompt_item items[MOST_TOKENS / BLOCK];
    mls_tensor parts[MOST_TOKENS / BLOCK];
    unsigned char *memory = mls_alloc(blocks, bytes);
    bool busy = true;
    int written = -1;
    for (size_t i = 0; i < blocks; i++) {
        fill_part(memory + i * bytes, bytes, p, (i + 1) * BLOCK);
        CHECK(mls_tensor_init(&parts[i], memory + i * bytes, MLS_U8, 1, &bytes,
                              &status) == MLS_OK);
        items[i] = (mls_prompt_item){.end = (i + 1) * BLOCK,
                                     .meta = (const unsigned char *)"meta",
                                     .meta_bytes = 4,
                                     .parts = &parts[i],
                                     .part_count = 1};
    }
    const mls_prompt_prefix prefix = prefix_of(p, blocks * BLOCK);
    if (mls_prompt_lock(log, &busy, &status) == MLS_OK && !busy) {
        const mls_code code =
            mls_prompt_put(log, &prefix, items, blocks, max_bytes, NULL, &status);
        mls_prompt_unlock(log);
        written = code == MLS_OK ? 0 : -1;
        for (size_t i = 0; code == MLS_OK && i < blocks; i++) {
            written += items[i].result == 1;
        }
    }
    mls_free(memory);
    return written;
}

static inline int put_blocks(mls_prompt_log *log, uint32_t number, size_t blocks)
{
    const prompt p = prompt_of(number);
    return put_bytes(log, &p, blocks, PART_BYTES, UINT64_MAX);
}

static inline mls_prompt_match *match_tokens(mls_prompt_log *log, const prompt *p,
                                             size_t count)
{
    mls_prompt_match *match = NULL;
    const mls_prompt_prefix prefix = prefix_of(p, count);
    CHECK(mls_prompt_match_new(log, &prefix, &match, &status) == MLS_OK);
    return match;
}

/* Number of tokens of a prompt that are stored, with the right content; SIZE_MAX if a
 * record has another content. */
static inline size_t stored_tokens(mls_prompt_log *log, uint32_t number)
{
    const prompt p = prompt_of(number);
    mls_prompt_match *match = match_tokens(log, &p, MOST_TOKENS);
    size_t length = match->length;
    for (size_t i = 0; i < match->count && length != SIZE_MAX; i++) {
        size_t bytes = (size_t)match->hits[i].header.payload_bytes;
        unsigned char *into = mls_alloc(bytes, 1), *expected = mls_alloc(bytes, 1);
        mls_prompt_request request = {.hit = i};
        fill_part(expected, bytes, &p, match->hits[i].end);
        if (mls_tensor_init(&request.into, into, MLS_U8, 1, &bytes, &status) != MLS_OK ||
            mls_prompt_read(match, &request, 1, log->kernels, log->crc, NULL, NULL,
                            &status) != MLS_OK ||
            request.code != MLS_OK || memcmp(into, expected, bytes) != 0) {
            length = SIZE_MAX;
        }
        mls_free(into);
        mls_free(expected);
    }
    mls_prompt_match_free(match);
    return length;
}

static inline bool mark_all(mls_prompt_log *log, uint32_t number,
                            mls_prompt_operation operation, size_t *changed)
{
    const prompt p = prompt_of(number);
    size_t hits[MOST_TOKENS];
    bool busy = true;
    mls_prompt_match *match = match_tokens(log, &p, MOST_TOKENS);
    for (size_t i = 0; i < match->count; i++) {
        hits[i] = i;
    }
    mls_code code = mls_prompt_lock(log, &busy, &status);
    if (code == MLS_OK && !busy) {
        code = mls_prompt_mark(log, match, hits, match->count, operation, NULL, changed,
                               &status);
        mls_prompt_unlock(log);
    }
    mls_prompt_match_free(match);
    return code == MLS_OK && !busy;
}

/* Path of a segment, valid until the next call of path_of. */
static inline const char *segment_path(unsigned number)
{
    char name[64];
    snprintf(name, sizeof name, "log/segment-%08u", number);
    return path_of(name);
}

static inline size_t file_bytes(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 ? (size_t)info.st_size : SIZE_MAX;
}

/* Flip a bit of a byte of a file. */
static inline void flip_byte(const char *path, size_t offset)
{
    unsigned char byte = 0;
    FILE *file = fopen(path, "r+b");
    REQUIRE(file != NULL);
    CHECK(fseek(file, (long)offset, SEEK_SET) == 0 && fread(&byte, 1, 1, file) == 1);
    byte ^= 4;
    CHECK(fseek(file, (long)offset, SEEK_SET) == 0 && fwrite(&byte, 1, 1, file) == 1);
    CHECK(fclose(file) == 0);
}

/* Save the index, as a writer does now and then. Returns whether it succeeded. */
static inline bool store_index(mls_prompt_log *log)
{
    bool busy = true;
    mls_code code = mls_prompt_lock(log, &busy, &status);
    if (code == MLS_OK && !busy) {
        mls_prompt_lock_state(log);
        code = mls_prompt_index_save(log, &status);
        mls_prompt_unlock_state(log);
        mls_prompt_unlock(log);
    }
    return code == MLS_OK && !busy;
}

#endif
