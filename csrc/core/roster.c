/* roster: one walk over the list, each record into its place of all columns.
 *
 * Room for parts is counted from the list before: a part is a JSON value in the text.
 * Whoever is refused is not told why.  mlstate/_manifest.py finds that out, with words
 * for each rule, and a test sees to it that both refuse the same.
 */
#include "roster.h"

#include "crc32c.h"
#include "index.h"
#include "json.h"
#include "mem.h"
#include "pattern.h"
#include "seal.h"

#include <stdio.h>
#include <string.h>

enum { NODES = 64 << 20, PATH_ROOM = MLS_GENERATION_DIGITS + 40 };

#define NO_PARTS SIZE_MAX

/* Where the reader is.  All of it but the roster is freed at the end. */
typedef struct reader {
    const mls_json *json;
    mls_text generation;
    mls_json_node list;
    size_t patterns;     /* that the manifest has; SIZE_MAX: it has none */
    size_t *group_count; /* of each pattern: parts of its ranks, or NO_PARTS */
    size_t parts_used;
    mls_roster roster;
} reader;

enum { PATH, BYTES, CRC, SHARDS, DATA_BYTES, PATTERN, PARTS, MEMBERS };

#define MEMBER(name, kind)                                                               \
    {.key = (name), .length = sizeof(name) - 1, .needed = true, .type = (kind)}

/* In the order in which they are written. */
static const mls_json_member record_members[MEMBERS] = {
    [PATH] = MEMBER("path", MLS_JSON_STRING),
    [BYTES] = MEMBER("bytes", MLS_JSON_NUMBER),
    [CRC] = MEMBER("crc32c", MLS_JSON_STRING),
    [SHARDS] = MEMBER("shards", MLS_JSON_NUMBER),
    [DATA_BYTES] = MEMBER("data_bytes", MLS_JSON_NUMBER),
    [PATTERN] = MEMBER("pattern", MLS_JSON_NUMBER),
    [PARTS] = MEMBER("parts", MLS_JSON_ARRAY),
};

/* Find the list and what it must agree with.  What kind of text the generation is made of
 * is asked by whoever reads the rest: paths are compared with it as it is. */
static bool find_list(reader *r)
{
    enum { GENERATION, LIST, PATTERNS, COUNT };
    mls_json_member m[COUNT] = {[GENERATION] = MEMBER("generation", MLS_JSON_STRING),
                                [LIST] = MEMBER("indexes", MLS_JSON_ARRAY),
                                [PATTERNS] = MEMBER("patterns", MLS_JSON_ARRAY)};
    m[PATTERNS].needed = false;
    if (mls_json_type_of(r->json, 0) != MLS_JSON_OBJECT ||
        mls_json_members(r->json, 0, m, COUNT) < COUNT) {
        return false;
    }
    r->generation = mls_json_text(r->json, m[GENERATION].node);
    r->list = m[LIST].node;
    r->patterns = m[PATTERNS].node == MLS_JSON_NONE
                      ? SIZE_MAX
                      : mls_json_size(r->json, m[PATTERNS].node);
    return r->generation.length == MLS_GENERATION_DIGITS;
}

/* Values inside arrays inside the list's objects, of which parts are some.  A record that
 * is none, and one that has other arrays, only makes the room larger than it need be. */
static size_t count_parts(const reader *r)
{
    size_t sum = 0;
    for (mls_json_node record = mls_json_first(r->json, r->list); record != MLS_JSON_NONE;
         record = mls_json_next(r->json, record)) {
        for (mls_json_node value = mls_json_first(r->json, record);
             value != MLS_JSON_NONE; value = mls_json_next(r->json, value)) {
            sum += mls_json_size(r->json, value);
        }
    }
    return sum;
}

/* All columns, and the table of patterns.  False where there is no memory; what was
 * allocated before is freed with the rest. */
static bool make_room(reader *r)
{
    mls_roster *out = &r->roster;
    const size_t count = mls_json_size(r->json, r->list);
    const size_t known = r->patterns == SIZE_MAX ? 0 : r->patterns;
    out->count = count;
    if ((out->bytes = mls_alloc(count, sizeof *out->bytes)) == NULL ||
        (out->shards = mls_alloc(count, sizeof *out->shards)) == NULL ||
        (out->data_bytes = mls_alloc(count, sizeof *out->data_bytes)) == NULL ||
        (out->crcs = mls_alloc(count, sizeof *out->crcs)) == NULL ||
        (r->patterns != SIZE_MAX &&
         (out->patterns = mls_alloc(count, sizeof *out->patterns)) == NULL) ||
        (out->part_ends = mls_alloc(count, sizeof *out->part_ends)) == NULL ||
        (out->parts = mls_alloc(known == 0 ? 0 : count_parts(r), sizeof *out->parts)) ==
            NULL ||
        (r->group_count = mls_alloc(known, sizeof *r->group_count)) == NULL) {
        return false;
    }
    for (size_t i = 0; i < known; i++) {
        r->group_count[i] = NO_PARTS;
    }
    return true;
}

/* A whole number that a signed one of 64 bits holds. */
static bool read_number(const reader *r, mls_json_node node, uint64_t *out)
{
    return mls_json_u64(r->json, node, out) && *out <= INT64_MAX;
}

/* The one path that an index can have: nothing else of the pool is ever opened by it. */
static bool path_is(const reader *r, mls_json_node node, size_t rank)
{
    char expected[PATH_ROOM];
    const int length = snprintf(expected, sizeof expected, "index/%.*s.%zu.json",
                                (int)MLS_GENERATION_DIGITS, r->generation.data, rank);
    const mls_text text = mls_json_text(r->json, node);
    return text.length == (size_t)length && memcmp(text.data, expected, text.length) == 0;
}

/* Which pattern a rank's index has, and which parts by the pattern's groups.  The first
 * rank of a pattern says how many groups that has: nobody knows better here, and indexes
 * are compared with the manifest when they are read. */
static bool read_parts(reader *r, const mls_json_member *m, size_t rank)
{
    uint64_t pattern;
    const size_t count = mls_json_size(r->json, m[PARTS].node);
    if (!read_number(r, m[PATTERN].node, &pattern) || pattern >= r->patterns ||
        count > MLS_PATTERN_GROUPS ||
        (r->group_count[pattern] != NO_PARTS && r->group_count[pattern] != count)) {
        return false;
    }
    r->group_count[pattern] = count;
    r->roster.patterns[rank] = (uint32_t)pattern; /* patterns are values of the text */
    for (mls_json_node node = mls_json_first(r->json, m[PARTS].node);
         node != MLS_JSON_NONE; node = mls_json_next(r->json, node)) {
        if (!read_number(r, node, &r->roster.parts[r->parts_used++])) {
            return false;
        }
    }
    return true;
}

/* One rank's record.  Members that are not known are passed over: later versions may have
 * more.  Without patterns, so are those two of the members. */
static bool read_record(reader *r, mls_json_node record, mls_json_member *m, size_t rank)
{
    const size_t count = r->patterns == SIZE_MAX ? PATTERN : MEMBERS;
    mls_roster *out = &r->roster;
    if (mls_json_type_of(r->json, record) != MLS_JSON_OBJECT ||
        mls_json_members(r->json, record, m, count) < count ||
        !path_is(r, m[PATH].node, rank)) {
        return false;
    }
    const mls_text crc = mls_json_text(r->json, m[CRC].node);
    if (!read_number(r, m[BYTES].node, &out->bytes[rank]) || out->bytes[rank] == 0 ||
        !read_number(r, m[SHARDS].node, &out->shards[rank]) ||
        !read_number(r, m[DATA_BYTES].node, &out->data_bytes[rank]) ||
        crc.length != MLS_CRC_DIGITS ||
        !mls_crc_from_digits(crc.data, &out->crcs[rank]) ||
        (count == MEMBERS && !read_parts(r, m, rank))) {
        return false;
    }
    out->part_ends[rank] = r->parts_used;
    return true;
}

/* Where the list's bracket is closed: looked for from the last of its values on, which
 * are few, in a text that is known to be good, so that the end is never passed. */
static size_t end_of_list(const reader *r, const char *text, mls_json_node last)
{
    size_t at = mls_json_offset(r->json, last), open = 0;
    bool quoted = false;
    for (;; at++) {
        const char c = text[at];
        if (quoted) {
            at += c == '\\';
            quoted = c != '"';
        } else if (c == '"') {
            quoted = true;
        } else if (c == '[' || c == '{') {
            open++;
        } else if (c == ']' || c == '}') {
            if (open == 0) {
                return at + 1;
            }
            open--;
        }
    }
}

/* The first record that is not as it should be ends it, with its rank for whoever
 * debugs. */
static mls_code read_list(reader *r, const char *text, mls_status *st)
{
    mls_json_member m[MEMBERS];
    memcpy(m, record_members, sizeof m);
    if (!find_list(r)) {
        return mls_fail(st, MLS_E_VALUE, "the text has no list of indexes");
    }
    if (!make_room(r)) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a list of %zu indexes",
                        r->roster.count);
    }
    mls_json_node node = mls_json_first(r->json, r->list), last = node;
    for (size_t rank = 0; rank < r->roster.count; rank++) {
        if (!read_record(r, node, m, rank)) {
            return mls_fail(st, MLS_E_VALUE,
                            "the index of rank %zu is not listed rightly", rank);
        }
        last = node;
        node = mls_json_next(r->json, node);
    }
    if (r->roster.count == 0) {
        return mls_fail(st, MLS_E_VALUE, "the list of indexes is empty");
    }
    r->roster.begin = mls_json_offset(r->json, r->list);
    r->roster.end = end_of_list(r, text, last);
    return MLS_OK;
}

/* The list is taken from a text that is good in all else that JSON asks. */
mls_code mls_roster_read(const char *text, size_t length, mls_roster *out, mls_status *st)
{
    mls_json *json = NULL;
    mls_code code = mls_json_parse(
        text, length, (mls_json_limits){MLS_MANIFEST_DEPTH, NODES}, &json, st);
    if (code != MLS_OK) {
        return code;
    }
    reader r = {.json = json};
    code = read_list(&r, text, st);
    mls_free(r.group_count);
    mls_json_free(json);
    if (code == MLS_OK) {
        *out = r.roster;
    } else {
        mls_roster_fini(&r.roster);
    }
    return code;
}

/* Columns are NULL where nothing was allocated. */
void mls_roster_fini(mls_roster *roster)
{
    mls_free(roster->bytes);
    mls_free(roster->shards);
    mls_free(roster->data_bytes);
    mls_free(roster->crcs);
    mls_free(roster->patterns);
    mls_free(roster->part_ends);
    mls_free(roster->parts);
    *roster = (mls_roster){0};
}
