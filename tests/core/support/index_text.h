/* index_text: a good index, changed at one place with a correct checksum, so that a rule
 * of the reader refuses it. The including file defines `good`, its text.
 */
#ifndef MLS_INDEX_TEXT_H
#define MLS_INDEX_TEXT_H

#include "checkpoint/index/index.h"
#include "io/json_checksum.h"
#include "support/runner.h"

#include <stdlib.h>

enum { INDEX_ROOM = 16384 };

/* `good` with the first `from` replaced by `to`.  Returns the length. */
static inline size_t change_index(const char *good, const char *from, const char *to,
                                  char out[INDEX_ROOM])
{
    const char *at = strstr(good, from);
    CHECK(at != NULL && strlen(good) + strlen(to) < INDEX_ROOM);
    if (at == NULL) {
        printf("    the good index has no %s\n", from);
        at = good;
    }
    snprintf(out, INDEX_ROOM, "%.*s%s%s", (int)(at - good), good, to, at + strlen(from));
    (void)mls_json_checksum_set(out, strlen(out), &mls_crc_scalar);
    return strlen(out);
}

/* Parse from memory of exactly that length; on failure the output must be unchanged. */
static inline mls_code parse_index(const char *text, size_t length, mls_status *st)
{
    mls_index index, before;
    char *copy = malloc(length + 1);
    if (copy == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a test");
    }
    memcpy(copy, text, length);
    memset(&index, 0x5a, sizeof index);
    memcpy(&before, &index, sizeof index);
    mls_status_clear(st);
    const mls_code code = mls_index_parse(copy, length, &mls_crc_scalar, &index, st);
    free(copy);
    if (code == MLS_OK) {
        mls_index_fini(&index);
    } else {
        CHECK(memcmp(&index, &before, sizeof index) == 0);
        CHECK(st->code == code && st->text[0] != '\0');
    }
    return code;
}

/* A change that must be refused: the shard named by the error, if any, and the rest of
 * its message. */
typedef struct lie {
    const char *from, *to, *name, *text;
} lie;

/* Texts of many rows. */
#define OUT_OF_RANGE(column) "\"" column "\" is not a whole number in its range"
#define EXTRA(column)        "\"" column "\" has more values than its table has rows"
#define TOO_FEW(column)      "\"" column "\" must have one value for each row of its table"
#define NO_HEX(column)       "\"" column "\" must have 8 hexadecimal digits for each value"
#define WRONG_BYTES          "\"bytes\" does not match shape, layout and dtype"
#define BEYOND_FILE          "\"offset\" plus bytes exceeds the length of the file"

static inline void check_refused_edits(const char *good, const lie *lies, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        char text[INDEX_ROOM];
        mls_status st;
        const size_t length = change_index(good, lies[i].from, lies[i].to, text);
        const mls_code code = parse_index(text, length, &st);
        const char *name = lies[i].name;
        char message[MLS_TEXT_BYTES];
        snprintf(message, sizeof message, "shard of '%s': %s", name, lies[i].text);
        const char *expected = *name == '\0' ? lies[i].text : message;
        const bool refused = code == MLS_E_FORMAT && strcmp(st.text, expected) == 0 &&
                             strcmp(st.name, name) == 0;
        if (!refused) {
            printf("    %s -> %s: %s (%s)\n", lies[i].from, lies[i].to,
                   code == MLS_OK ? "accepted" : st.text, st.name);
        }
        CHECK(refused);
    }
}

#define CHECK_LIES(lies) check_refused_edits(good, lies, sizeof(lies) / sizeof((lies)[0]))

/* Replace each value of the good index by each of `values`: refused, or accepted as
 * valid; never a crash.  Returns how many were tried, and how many
 * of them were refused. */
static inline size_t replace_every_value(const char *good, const char *const *values,
                                         size_t count, size_t *refused)
{
    size_t all = 0;
    *refused = 0;
    for (const char *at = good + sizeof MLS_JSON_CHECKSUM_START; *at != '\0'; at++) {
        /* a value starts after a colon, bracket or comma, and ends at the next such
         * character */
        const size_t length = strcspn(at, ",:[]{}\n");
        if (strchr(":[,", at[-1]) == NULL || length == 0 || at[length] == ':') {
            continue;
        }
        for (size_t i = 0; i < count; i++) {
            char text[INDEX_ROOM];
            mls_status st;
            snprintf(text, sizeof text, "%.*s%s%s", (int)(at - good), good, values[i],
                     at + length);
            (void)mls_json_checksum_set(text, strlen(text), &mls_crc_scalar);
            const mls_code code = parse_index(text, strlen(text), &st);
            CHECK(code == MLS_OK || code == MLS_E_FORMAT);
            *refused += code != MLS_OK;
            all++;
        }
    }
    return all;
}

#endif
