/* libFuzzer target: any bytes as a manifest's list of indexes.  What is accepted must be
 * in bounds and leave JSON when it is cut out.
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -Icsrc/core fuzz/fuzz_roster.c \
 *       csrc/core/{roster,seal,json,text,mem,status,cpu}.c csrc/core/crc32c*.c
 */
#include "roster.h"

#include "json.h"
#include "pattern.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

/* Each rank's numbers, and that ranks of a pattern have equally many parts. */
static void check_ranks(const mls_roster *r)
{
    size_t start = 0;
    for (size_t i = 0; i < r->count; i++) {
        require(r->bytes[i] > 0 && r->bytes[i] <= INT64_MAX);
        require(r->shards[i] <= INT64_MAX && r->data_bytes[i] <= INT64_MAX);
        require(r->part_ends[i] >= start);
        require(r->part_ends[i] - start <= MLS_PATTERN_GROUPS);
        for (size_t j = start; j < r->part_ends[i]; j++) {
            require(r->parts[j] <= INT64_MAX);
        }
        start = r->part_ends[i];
    }
}

/* The text without the list, which whoever wants the rest reads. */
static void check_rest(const char *text, size_t length, const mls_roster *r)
{
    mls_json *rest = NULL;
    mls_status st;
    const size_t behind = length - r->end;
    char *cut = malloc(r->begin + 2 + behind);
    require(cut != NULL && r->begin < r->end && r->end <= length);
    memcpy(cut, text, r->begin);
    memcpy(cut + r->begin, "[]", 2);
    memcpy(cut + r->begin + 2, text + r->end, behind);
    require(mls_json_parse(cut, r->begin + 2 + behind,
                           (mls_json_limits){SIZE_MAX, UINT32_MAX - 1}, &rest,
                           &st) == MLS_OK);
    const mls_json_node list = mls_json_find(rest, 0, "indexes");
    require(list != MLS_JSON_NONE && mls_json_size(rest, list) == 0);
    mls_json_free(rest);
    free(cut);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    mls_roster r = {.count = 77};
    mls_status st;
    char *text = malloc(size + 1); /* so that reading behind the end is noticed */
    require(text != NULL);
    if (size > 0) {
        memcpy(text, data, size);
    }
    const mls_code code = mls_roster_read(text, size, &r, &st);
    if (code == MLS_OK) {
        check_ranks(&r);
        check_rest(text, size, &r);
        mls_roster_fini(&r);
    } else {
        require(code == MLS_E_FORMAT || code == MLS_E_VALUE);
        require(r.count == 77 && st.text[0] != '\0');
    }
    free(text);
    return 0;
}
