/* libFuzzer target: any bytes as the index and the segment of a prompt store. The log
 * opens, lists, verifies and repairs itself, and then stores and finds a prompt.
 *
 * tools/fuzz.sh builds it with clang -fsanitize=fuzzer,address,undefined and all of
 * csrc/core.
 */
#include "base/memory.h"
#include "base/size.h"
#include "prompts/prompt_log_state.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { BLOCK = 4, COUNT = 8 };

static const mls_crc_kernels *const crc = &mls_crc_scalar;
static char folder[] = "/dev/shm/mlstate-fuzz-XXXXXX"; /* memory: syncs are fast */

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

static mls_prompt_log *open_log(void)
{
    mls_prompt_log *log = NULL;
    mls_status st;
    require(mls_prompt_log_open(folder, true, mls_kernels_of(MLS_CPU_SCALAR), NULL, &log,
                                &st) == MLS_OK);
    return log;
}

/* Write bytes to a file of the store, as a whole. */
static void write_file(const char *name, const unsigned char *data, size_t bytes)
{
    char path[sizeof folder + 32];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    require(file != NULL && fwrite(data, 1, bytes, file) == bytes && fclose(file) == 0);
}

static void remove_all(const mls_prompt_log *log)
{
    char name[MLS_PROMPT_NAME];
    uint32_t *numbers = NULL;
    size_t count = 0;
    mls_status st;
    require(mls_prompt_segments_list(log, false, &numbers, &count, &st) == MLS_OK);
    for (size_t i = 0; i < count; i++) {
        (void)unlinkat(log->folder, mls_prompt_segment_name(name, numbers[i]), 0);
    }
    (void)unlinkat(log->folder, MLS_PROMPT_INDEX, 0);
    (void)unlinkat(log->folder, MLS_PROMPT_USED, 0);
    mls_free(numbers);
}

static void remove_folder(void)
{
    mls_prompt_log *log = open_log();
    remove_all(log);
    (void)unlinkat(log->folder, MLS_PROMPT_STORE, 0);
    mls_prompt_log_free(log);
    (void)rmdir(folder);
}

/* Fuzzers do not guess checksums: each header gets the right one. */
static void correct_headers(unsigned char *data, size_t size)
{
    for (size_t at = MLS_PROMPT_FILE_HEAD; at + MLS_PROMPT_FIXED <= size;
         at += MLS_PROMPT_UNIT) {
        const size_t bytes = mls_load_le32(data + at + 8);
        if (mls_prompt_header_begins(data + at) && bytes >= 8 && bytes <= size - at) {
            mls_store_le32(data + at + 4, crc->update(0, data + at + 8, bytes - 8));
        }
    }
}

/* The same for the index, which also gets the head of this store. */
static void correct_index(const mls_prompt_log *log, unsigned char *data, size_t size)
{
    enum { TABLES = MLS_PROMPT_FILE_HEAD + 24 };
    mls_prompt_head head = {0};
    if (size >= TABLES) {
        memcpy(head.id, log->id, sizeof head.id);
        mls_prompt_head_write(data, "mlspridx", &head, crc);
        const uint32_t sum = crc->update(0, data + MLS_PROMPT_FILE_HEAD, 20);
        mls_store_le32(data + TABLES - 4, crc->update(sum, data + TABLES, size - TABLES));
    }
}

static bool visit(void *context, const mls_prompt_listed *listed)
{
    *(uint64_t *)context +=
        listed->hit.header.payload_bytes + listed->hit.header.token_count;
    return true;
}

/* Store and find a prompt in a log with any content. */
static void use_log(mls_prompt_log *log)
{
    uint32_t tokens[COUNT] = {0};
    unsigned char payload[100] = {1}, copy[100];
    size_t bytes = sizeof payload, count = 0;
    uint64_t sum = 0;
    bool busy = true;
    mls_status st;
    mls_tensor part;
    mls_prompt_damage *damage = NULL;
    mls_prompt_match *match = NULL;
    mls_prompt_stats stats;
    const mls_prompt_prefix prefix = {.fingerprint = (const unsigned char *)"model",
                                      .fingerprint_bytes = 5,
                                      .tokens = tokens,
                                      .count = COUNT,
                                      .block_tokens = BLOCK};
    mls_prompt_item items[3] = {
        {.end = BLOCK}, {.end = 2 * BLOCK}, {.kind = 1, .end = 5}};
    require(mls_tensor_init(&part, payload, MLS_U8, 1, &bytes, &st) == MLS_OK);
    for (size_t i = 0; i < 3; i++) {
        items[i].parts = &part;
        items[i].part_count = 1;
    }
    require(mls_prompt_list(log, visit, &sum, NULL, &st) == MLS_OK);
    require(mls_prompt_lock(log, &busy, &st) == MLS_OK && !busy);
    require(mls_prompt_verify(log, true, NULL, &damage, &count, &st) == MLS_OK);
    mls_free(damage);
    require(mls_prompt_put(log, &prefix, items, 3, UINT64_MAX, NULL, &st) == MLS_OK);
    require(items[0].result >= 0 && items[1].result >= 0 && items[2].result >= 0);
    mls_prompt_unlock(log);
    require(mls_prompt_match_new(log, &prefix, &match, &st) == MLS_OK);
    for (size_t i = 0; i < match->count; i++) {
        mls_prompt_request request = {.hit = i};
        require(match->hits[i].end <= COUNT);
        if (match->hits[i].header.payload_bytes == sizeof copy &&
            match->hits[i].header.part_count == 1) {
            require(mls_tensor_init(&request.into, copy, MLS_U8, 1, &bytes, &st) ==
                    MLS_OK);
            require(mls_prompt_read(match, &request, 1, log->kernels, crc, NULL, NULL,
                                    &st) == MLS_OK);
        }
    }
    mls_prompt_match_free(match);
    require(mls_prompt_lock(log, &busy, &st) == MLS_OK && !busy);
    require(mls_prompt_prune(log, 2000, NULL, &sum, &st) == MLS_OK);
    mls_prompt_unlock(log);
    require(mls_prompt_stats_of(log, &stats, &st) == MLS_OK && stats.records < 1000);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool is_ready;
    if (!is_ready) { /* always the same id, so that the keys of the seeds are right */
        unsigned char head[MLS_PROMPT_FILE_HEAD];
        if (mkdtemp(folder) == NULL) {
            strcpy(folder, "/tmp/mlstate-fuzz-XXXXXX");
            require(mkdtemp(folder) != NULL);
        }
        require(atexit(remove_folder) == 0);
        mls_prompt_head_write(head, "mlsprmpt", &(mls_prompt_head){0}, crc);
        write_file(MLS_PROMPT_STORE, head, sizeof head);
        is_ready = true;
    }
    if (size < 2 || size > 1 << 16) {
        return 0;
    }
    mls_prompt_log *log = open_log();
    unsigned char *copy = malloc(size);
    require(copy != NULL);
    memcpy(copy, data, size);
    remove_all(log);
    /* bytes of the index file; 0 after the padding of a record */
    const size_t index = 4 * (data[size - 2] + (size_t)256 * data[size - 1]) % size;
    if (index > 0) {
        correct_index(log, copy, index);
        write_file(MLS_PROMPT_INDEX, copy, index);
    }
    correct_headers(copy + index, size - index);
    write_file("segment-00000001", copy + index, size - index);
    mls_prompt_log_free(log);
    free(copy);
    log = open_log();
    use_log(log);
    mls_prompt_log_free(log);
    return 0;
}
