/* json_reader: parses JSON; refuses duplicate keys, invalid UTF-8, too many values, and
 * too deep or long texts.
 *
 * The document is copied once, strings are unescaped inside that copy, and a node takes
 * 20 bytes. Nodes are stored in file order, so the first member of a container is the
 * node right after it. While a container is open, its `next` is its parent: this is the
 * whole stack, so depth costs no memory.
 *
 * The parser is a loop over three states (json_state). Each function below reads one item
 * at p->at, moves p->at past it, and returns a code. The first failure ends the loop with
 * the status filled. The caller gets no data before the whole text has passed.
 *
 * Some input is refused beyond the grammar. Duplicate keys: readers disagree on which one
 * counts. Half surrogates and invalid UTF-8: they cannot form a name. Numbers are only
 * checked here; the accessors convert them.
 */
#include "io/json_reader.h"

#include "base/memory.h"
#include "base/size.h"

#include <stdbool.h>
#include <string.h>

/* 20 bytes, so that a hostile text of short values costs at most ten times its length.
 * Type and length share a word. */
typedef struct json_node {
    uint32_t type : 3;
    uint32_t length : 29; /* bytes of text, or number of members */
    uint32_t at;          /* offset of the value's first byte */
    uint32_t key;         /* offset of the key's text, unescaped */
    uint32_t key_length;
    mls_json_node next; /* the next member; the parent while a container is open */
} json_node;

/* The largest length that fits 29 bits. */
#define MAX_TEXT ((size_t)0x1FFFFFFF)

enum { SAFE_DIGITS = 19 }; /* digits of a number that is certainly below 2**64 */

/* The text is unescaped in place while it is parsed; keys and strings point into it. */
struct mls_json {
    char *text;
    json_node *nodes;
    size_t count, room;
};

/* State of the parser. Growing memory belongs to `doc`, except the scratch array, and is
 * freed at the end of mls_json_parse. */
typedef struct json_parser {
    mls_json *doc;
    const mls_json_limits *limits;
    mls_status *st;
    size_t at, end;
    size_t depth;
    mls_json_node open;    /* innermost open container, or MLS_JSON_NONE */
    bool in_object;        /* it is an object: the next token is a key */
    mls_json_node last;    /* its last member so far, or MLS_JSON_NONE */
    mls_str key;           /* of the next member */
    mls_json_node checked; /* the last object without a duplicate key, or MLS_JSON_NONE */
    mls_json_node guess;   /* its member whose key may come next, or MLS_JSON_NONE */
    bool keys_match;       /* so far the open object has the keys of `checked` */
    bool has_escape;       /* a key contained an escape, so keys are not guessed */
    uint32_t *scratch;     /* memory for sorting members */
    size_t scratch_room;
} json_parser;

/* What the parser expects next, after white space. */
typedef enum json_state {
    JSON_WANTS_VALUE,
    JSON_WANTS_MEMBER, /* right after an opening bracket */
    JSON_HAS_VALUE
} json_state;

/* ---- characters ----
 *
 * Bytes are compared as int, with -1 for the end of the text. So a check of a character
 * includes the check of the length, and nothing is read beyond the end. */

/* Skip the four characters that JSON allows between tokens. Usually there are none. */
static inline void skip_space(json_parser *p)
{
    while (p->at < p->end && (unsigned char)p->doc->text[p->at] <= ' ') {
        const char c = p->doc->text[p->at];
        if (c != ' ' && c != '\n' && c != '\t' && c != '\r') {
            return;
        }
        p->at++;
    }
}

/* Return whether two keys of `length` bytes are equal. Most keys have 4 to 16 bytes: two
 * loads from the start and two from the end, which may overlap, compare them without a
 * call. */
static inline bool same_bytes(const char *a, const char *b, size_t length)
{
    uint64_t first[2], last[2];
    uint32_t start[2], end[2];
    if (length >= sizeof *first && length <= 2 * sizeof *first) {
        memcpy(&first[0], a, sizeof *first);
        memcpy(&first[1], b, sizeof *first);
        memcpy(&last[0], a + length - sizeof *last, sizeof *last);
        memcpy(&last[1], b + length - sizeof *last, sizeof *last);
        return first[0] == first[1] && last[0] == last[1];
    }
    if (length >= sizeof *start && length < sizeof *first) {
        memcpy(&start[0], a, sizeof *start);
        memcpy(&start[1], b, sizeof *start);
        memcpy(&end[0], a + length - sizeof *end, sizeof *end);
        memcpy(&end[1], b + length - sizeof *end, sizeof *end);
        return start[0] == start[1] && end[0] == end[1];
    }
    return memcmp(a, b, length) == 0;
}

/* Return the byte at `at`, or -1 at the end. */
static int byte_at(const json_parser *p, size_t at)
{
    return at < p->end ? (unsigned char)p->doc->text[at] : -1;
}

/* Report the unexpected byte at p->at; `expected` is a noun phrase. Returns MLS_E_FORMAT.
 * A byte that is not printable is shown as a number, so that a message never contains a
 * control character or half a UTF-8 character. */
static mls_code fail_unexpected(json_parser *p, const char *expected)
{
    const int c = byte_at(p, p->at);
    if (c < 0) {
        mls_fail_at(p->st, p->at, "JSON ends, expected %s", expected);
        mls_status_got(p->st, "end of text");
    } else if (c > ' ' && c < 0x7F) {
        mls_fail_at(p->st, p->at, "JSON has '%c', expected %s", c, expected);
        mls_status_got(p->st, "%c", c);
    } else {
        mls_fail_at(p->st, p->at, "JSON has byte 0x%02x, expected %s", (unsigned)c,
                    expected);
        mls_status_got(p->st, "0x%02x", (unsigned)c);
    }
    return mls_status_expected(p->st, "%s", expected);
}

/* ---- strings ---- */

/* Read the four hexadecimal digits of a \u escape into `*out`, and move p->at behind
 * them. */
static mls_code read_hex4(json_parser *p, unsigned long *out)
{
    unsigned long value = 0;
    for (int i = 0; i < 4; i++, p->at++) {
        const int c = byte_at(p, p->at);
        int digit = -1;
        if (c >= '0' && c <= '9') {
            digit = c - '0';
        } else if (c >= 'a' && c <= 'f') {
            digit = c - 'a' + 10;
        } else if (c >= 'A' && c <= 'F') {
            digit = c - 'A' + 10;
        }
        if (digit < 0) {
            return fail_unexpected(p, "a hexadecimal digit");
        }
        value = value * 16 + (unsigned long)digit;
    }
    *out = value;
    return MLS_OK;
}

/* Read a \u escape into `*out` as a code point; p->at is after the 'u'. A high surrogate
 * needs its low half. A lone half has no UTF-8 form and is refused; other readers insert
 * a replacement character, which could make two names equal. */
static mls_code read_unicode(json_parser *p, unsigned long *out)
{
    const size_t start = p->at - 2;
    unsigned long code = 0, low = 0;
    if (read_hex4(p, &code) != MLS_OK) {
        return MLS_E_FORMAT;
    }
    if (code >= 0xD800 && code < 0xDC00 && byte_at(p, p->at) == '\\' &&
        byte_at(p, p->at + 1) == 'u') {
        p->at += 2;
        if (read_hex4(p, &low) != MLS_OK) {
            return MLS_E_FORMAT;
        }
        if (low >= 0xDC00 && low < 0xE000) {
            *out = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            return MLS_OK;
        }
    }
    if (code >= 0xD800 && code < 0xE000) {
        return mls_fail_at(p->st, start,
                           "JSON string has half of a surrogate pair (\\u%04lx)", code);
    }
    *out = code;
    return MLS_OK;
}

/* Read an escape; p->at is on the backslash. Its character is stored at offset `*write`
 * of the text, which advances. It overwrites only text that has been read: an escape is
 * at least as long as its character. */
static mls_code read_escape(json_parser *p, size_t *write)
{
    static const char letters[] = "\"\\/bfnrt";
    static const char meanings[] = "\"\\/\b\f\n\r\t";
    p->at++;
    const int c = byte_at(p, p->at);
    const char *letter = c > 0 ? strchr(letters, c) : NULL;
    if (letter != NULL) {
        p->doc->text[(*write)++] = meanings[letter - letters];
        p->at++;
        return MLS_OK;
    }
    if (c != 'u') {
        return fail_unexpected(p, "an escape (one of \"\\/bfnrtu)");
    }
    p->at++;
    unsigned long code = 0;
    if (read_unicode(p, &code) != MLS_OK) {
        return MLS_E_FORMAT;
    }
    /* this escape has at least six bytes, enough for the longest UTF-8 form of four */
    *write += mls_utf8_put(p->doc->text + *write, code);
    return MLS_OK;
}

/* Move the plain ASCII characters at p->at, up to a quote, a backslash or any other byte,
 * to offset `*write` of the text, and advance both. Eight are examined at a time, until
 * fewer than eight are plain. */
static inline void copy_unescaped(json_parser *p, size_t *write)
{
    char *text = p->doc->text;
    const size_t start = p->at;
    size_t at = start, printable = 8;
    while (printable == 8 && p->end - at >= 8) {
        printable = mls_str_eight_printable(text + at);
        at += printable;
    }
    /* the last characters of the text, less than eight */
    while (printable == 8 && at < p->end && text[at] >= ' ' && text[at] < 0x7F &&
           text[at] != '"' && text[at] != '\\') {
        at++;
    }
    if (*write != start) {
        memmove(text + *write, text + start, at - start);
    }
    *write += at - start;
    p->at = at;
}

/* Read a string into `*out` and unescape it in place; p->at is on the opening quote.
 * `write` never overtakes p->at. The text before `write` is final; the bytes from there
 * to p->at are not used again. */
static mls_code read_string(json_parser *p, mls_str *out)
{
    char *text = p->doc->text;
    const size_t start = ++p->at;
    size_t write = start;
    for (;;) {
        copy_unescaped(p, &write);
        const int c = byte_at(p, p->at);
        if (c == '"') {
            p->at++;
            *out = (mls_str){.data = text + start, .length = write - start};
            return MLS_OK;
        }
        if (c < ' ') {
            return fail_unexpected(p, c < 0 ? "'\"'"
                                            : "a string without control characters");
        }
        if (c == '\\') {
            if (read_escape(p, &write) != MLS_OK) {
                return MLS_E_FORMAT;
            }
            continue;
        }
        const size_t step =
            mls_utf8_length((const unsigned char *)text + p->at, p->end - p->at);
        if (step == 0) {
            return fail_unexpected(p, "UTF-8");
        }
        for (size_t i = 0; i < step; i++) {
            text[write++] = text[p->at++];
        }
    }
}

/* ---- nodes ----
 *
 * Nodes are referred to by index, since the array moves when it grows. No pointer to a
 * node may be kept across add_node. */

static mls_code fail_memory(json_parser *p)
{
    return mls_fail(p->st, MLS_E_MEMORY, "no memory for %zu JSON values", p->doc->count);
}

/* Make room for more nodes; `at` is the offset of the next value, for the message. Grows
 * by half and 16 nodes, so that the unused part stays in proportion to the used part.
 * MLS_E_FORMAT: the limit of values is reached. MLS_E_MEMORY. */
static mls_code grow_nodes(json_parser *p, size_t at)
{
    mls_json *doc = p->doc;
    if (doc->count >= p->limits->nodes) {
        return mls_fail_at(p->st, at, "JSON has more than %zu values", p->limits->nodes);
    }
    size_t room = doc->room + doc->room / 2 + 16;
    room = room < p->limits->nodes ? room : p->limits->nodes;
    json_node *nodes = mls_realloc(doc->nodes, room, sizeof *nodes);
    if (nodes == NULL) {
        return fail_memory(p);
    }
    doc->nodes = nodes;
    doc->room = room;
    return MLS_OK;
}

/* Add a node for the value at offset `at` to the open container, after its last member
 * and with the key read before, which is then used up. Offsets fit 32 bits because
 * MAX_TEXT does. */
static inline mls_code add_node(json_parser *p, mls_json_type type, size_t at)
{
    mls_json *doc = p->doc;
    if (doc->count == doc->room) {
        const mls_code code = grow_nodes(p, at);
        if (code != MLS_OK) {
            return code;
        }
    }
    const mls_json_node added = (mls_json_node)doc->count++;
    json_node *node = &doc->nodes[added];
    *node = (json_node){.type = (uint32_t)type & 7U,
                        .at = (uint32_t)at,
                        .key_length = (uint32_t)p->key.length,
                        .next = MLS_JSON_NONE};
    if (p->key.data != NULL) {
        node->key = (uint32_t)(p->key.data - doc->text);
    }
    if (p->last != MLS_JSON_NONE) {
        doc->nodes[p->last].next = added;
    }
    if (p->open != MLS_JSON_NONE) {
        json_node *parent = &doc->nodes[p->open];
        parent->length = (parent->length + 1U) & (uint32_t)MAX_TEXT;
    }
    p->last = added;
    p->key = (mls_str){0};
    return MLS_OK;
}

/* Add the container at p->at, open it, and move p->at behind its bracket. Its `next` is
 * its parent until close_container. The keys of an object are guessed from `checked`.
 * MLS_E_FORMAT: too many levels or values. MLS_E_MEMORY. */
static mls_code open_container(json_parser *p, mls_json_type type)
{
    if (p->depth >= p->limits->depth) {
        return mls_fail_at(p->st, p->at, "JSON is nested more than %zu levels deep",
                           p->limits->depth);
    }
    const mls_code code = add_node(p, type, p->at);
    if (code != MLS_OK) {
        return code;
    }
    if (type == MLS_JSON_OBJECT) {
        p->guess = p->checked != MLS_JSON_NONE && !p->has_escape
                       ? mls_json_first(p->doc, p->checked)
                       : MLS_JSON_NONE; /* an escaped key has another text in the file */
        p->keys_match = p->guess != MLS_JSON_NONE;
    }
    p->doc->nodes[p->last].next = p->open;
    p->open = p->last;
    p->in_object = type == MLS_JSON_OBJECT;
    p->last = MLS_JSON_NONE;
    p->depth++;
    p->at++;
    return MLS_OK;
}

/* ---- duplicate keys: members are sorted by key, so that a hostile file cannot make the
 * search quadratic ---- */

/* Compare the keys of nodes `a` and `b`, for sorting. Any total order works; comparing
 * the length first is cheap. Only equal keys compare equal. */
static int compare_keys(const mls_json *doc, uint32_t a, uint32_t b)
{
    const json_node *x = &doc->nodes[a], *y = &doc->nodes[b];
    if (x->key_length != y->key_length) {
        return x->key_length < y->key_length ? -1 : 1;
    }
    return memcmp(doc->text + x->key, doc->text + y->key, x->key_length);
}

/* Merge the ranges [0, half) and [half, count) of `from`, each sorted by key, into `to`;
 * stable. */
static void merge_runs(const mls_json *doc, const uint32_t *from, size_t half,
                       size_t count, uint32_t *to)
{
    size_t left = 0, right = half;
    for (size_t i = 0; i < count; i++) {
        const bool takes_left =
            left < half &&
            (right >= count || compare_keys(doc, from[left], from[right]) <= 0);
        to[i] = takes_left ? from[left++] : from[right++];
    }
}

/* Sort the `count` nodes of `members` by key. `spare` has the same length; returns the
 * one of both arrays that has the result. Bottom-up merge sort: no recursion, n log n at
 * worst, and stable, so that of two equal keys the later one in the file comes second. */
static uint32_t *sort_members(const mls_json *doc, uint32_t *members, uint32_t *spare,
                              size_t count)
{
    for (size_t width = 1; width < count; width *= 2) {
        for (size_t start = 0; start < count; start += 2 * width) {
            const size_t left = count - start;
            const size_t both = left < 2 * width ? left : 2 * width;
            merge_runs(doc, members + start, width < both ? width : both, both,
                       spare + start);
        }
        uint32_t *swap = members;
        members = spare;
        spare = swap;
    }
    return members;
}

/* Return whether objects `a` and `b` have the same keys in the same order. `b` has
 * members. If `a` has as many, the node after each object is its first member. */
static bool same_keys(const mls_json *doc, mls_json_node a, mls_json_node b)
{
    bool is_same = doc->nodes[a].length == doc->nodes[b].length;
    a++, b++; /* their first members */
    for (; is_same && a != MLS_JSON_NONE;
         a = doc->nodes[a].next, b = doc->nodes[b].next) {
        is_same = compare_keys(doc, a, b) == 0;
    }
    return is_same;
}

/* Refuse an object with a duplicate key (MLS_E_FORMAT). Readers disagree on which one
 * counts, so such a file can look harmless to one program and not to another. Lists
 * usually contain objects with equal keys, so an object with the keys of `checked`, the
 * last one that passed, is not sorted. One that is sorted and passes becomes `checked`.
 * MLS_E_MEMORY. */
static mls_code check_duplicates(json_parser *p, mls_json_node object)
{
    const mls_json *doc = p->doc;
    const size_t count = doc->nodes[object].length;
    if (count < 2 || (p->keys_match && count == doc->nodes[p->checked].length) ||
        (p->checked != MLS_JSON_NONE && same_keys(doc, p->checked, object))) {
        return MLS_OK;
    }
    if (p->scratch_room < 2 * count) {
        uint32_t *scratch = mls_realloc(p->scratch, 2 * count, sizeof *scratch);
        if (scratch == NULL) {
            return fail_memory(p);
        }
        p->scratch = scratch;
        p->scratch_room = 2 * count;
    }
    size_t filled = 0;
    for (mls_json_node m = object + 1; m != MLS_JSON_NONE; m = doc->nodes[m].next) {
        p->scratch[filled++] = m;
    }
    const uint32_t *sorted = sort_members(doc, p->scratch, p->scratch + count, count);
    mls_json_node duplicate = MLS_JSON_NONE; /* the earliest in the file */
    for (size_t i = 1; i < count; i++) {
        if (sorted[i] < duplicate && compare_keys(doc, sorted[i - 1], sorted[i]) == 0) {
            duplicate = sorted[i];
        }
    }
    if (duplicate == MLS_JSON_NONE) {
        p->checked = object;
        return MLS_OK;
    }
    const mls_str key = mls_json_key(doc, duplicate);
    const int width = (int)(key.length < 80 ? key.length : 80);
    mls_fail_at(p->st, doc->nodes[duplicate].key - 1U,
                "JSON has the key '%.*s' twice in one object", width, key.data);
    return mls_status_name(p->st, key.data, key.length);
}

/* Close the open container; p->at is on its closing bracket. Its `next` was the parent
 * and becomes a link to a sibling again. MLS_E_FORMAT: it is an object with a duplicate
 * key. MLS_E_MEMORY. */
static mls_code close_container(json_parser *p)
{
    const mls_json_node closed = p->open;
    json_node *node = &p->doc->nodes[closed];
    const mls_json_node parent = node->next;
    node->next = MLS_JSON_NONE;
    if (node->type == MLS_JSON_OBJECT) {
        const mls_code code = check_duplicates(p, closed);
        p->guess =
            MLS_JSON_NONE; /* the keys of the enclosing object are not tracked any more */
        p->keys_match = false;
        if (code != MLS_OK) {
            return code;
        }
    }
    p->open = parent;
    p->in_object =
        parent != MLS_JSON_NONE && p->doc->nodes[parent].type == MLS_JSON_OBJECT;
    p->last = closed;
    p->depth--;
    p->at++;
    return MLS_OK;
}

/* ---- values: each function adds one node, or opens a container ---- */

/* Skip one or more digits at p->at. */
static mls_code read_digits(json_parser *p)
{
    const size_t start = p->at;
    while (byte_at(p, p->at) >= '0' && byte_at(p, p->at) <= '9') {
        p->at++;
    }
    return p->at > start ? MLS_OK : fail_unexpected(p, "a digit");
}

/* Read a number at p->at and add its node. The grammar of RFC 8259, stricter than strtod:
 * no leading zeros or plus, no bare point, no hexadecimal, no NaN. The text is kept;
 * nothing is rounded. */
static mls_code read_number(json_parser *p)
{
    const size_t start = p->at;
    if (byte_at(p, p->at) == '-') {
        p->at++;
    }
    if (byte_at(p, p->at) == '0') {
        p->at++;
    } else if (read_digits(p) != MLS_OK) {
        return MLS_E_FORMAT;
    }
    if (byte_at(p, p->at) == '.') {
        p->at++;
        if (read_digits(p) != MLS_OK) {
            return MLS_E_FORMAT;
        }
    }
    if (byte_at(p, p->at) == 'e' || byte_at(p, p->at) == 'E') {
        p->at++;
        if (byte_at(p, p->at) == '+' || byte_at(p, p->at) == '-') {
            p->at++;
        }
        if (read_digits(p) != MLS_OK) {
            return MLS_E_FORMAT;
        }
    }
    const mls_code code = add_node(p, MLS_JSON_NUMBER, start);
    if (code == MLS_OK) {
        p->doc->nodes[p->last].length = (uint32_t)(p->at - start) & (uint32_t)MAX_TEXT;
    }
    return code;
}

/* Read `word`, which is true, false or null, and add a node of `type`. The caller's loop
 * then checks the character after it. */
static mls_code read_literal(json_parser *p, const char *word, mls_json_type type)
{
    const size_t start = p->at;
    for (size_t i = 0; word[i] != '\0'; i++, p->at++) {
        if (byte_at(p, p->at) != word[i]) {
            return fail_unexpected(p, word);
        }
    }
    return add_node(p, type, start);
}

/* Read a string value. The key read before stays in p->key until add_node takes it. */
static mls_code read_text_value(json_parser *p)
{
    const size_t start = p->at;
    mls_str text;
    if (read_string(p, &text) != MLS_OK) {
        return MLS_E_FORMAT;
    }
    const mls_code code = add_node(p, MLS_JSON_STRING, start);
    if (code == MLS_OK) {
        p->doc->nodes[p->last].length = (uint32_t)text.length & (uint32_t)MAX_TEXT;
    }
    return code;
}

/* Read the value at p->at; its first character decides its type. Sets `*state` to the
 * next item to expect: a member after an opening bracket, or the token after a whole
 * value. */
static mls_code read_value(json_parser *p, json_state *state)
{
    const int c = byte_at(p, p->at);
    *state = c == '{' || c == '[' ? JSON_WANTS_MEMBER : JSON_HAS_VALUE;
    switch (c) {
    case '{':
        return open_container(p, MLS_JSON_OBJECT);
    case '[':
        return open_container(p, MLS_JSON_ARRAY);
    case '"':
        return read_text_value(p);
    case 't':
        return read_literal(p, "true", MLS_JSON_TRUE);
    case 'f':
        return read_literal(p, "false", MLS_JSON_FALSE);
    case 'n':
        return read_literal(p, "null", MLS_JSON_NULL);
    default:
        return c == '-' || (c >= '0' && c <= '9') ? read_number(p)
                                                  : fail_unexpected(p, "a value");
    }
}

/* Return whether the next key and its colon equal, byte for byte, the key of member
 * `guess` of the object `checked`. If so, read them, and guess the next member; otherwise
 * stop guessing for this object. Lists usually contain objects with equal keys. */
static bool match_guessed_key(json_parser *p)
{
    const mls_json *doc = p->doc;
    if (p->guess == MLS_JSON_NONE) {
        p->keys_match = false; /* it has more members than the previous object */
        return false;
    }
    const json_node *node = &doc->nodes[p->guess];
    const char *text = doc->text + p->at;
    const size_t length = node->key_length;
    if (p->end - p->at < length + 3 || text[0] != '"' || text[length + 1] != '"' ||
        text[length + 2] != ':' || !same_bytes(text + 1, doc->text + node->key, length)) {
        p->guess = MLS_JSON_NONE;
        p->keys_match = false;
        return false;
    }
    p->key = (mls_str){text + 1, length};
    p->at += length + 3;
    p->guess = node->next;
    return true;
}

/* Read the key of an object's next member and its colon. Reads nothing inside an array.
 * Sets `has_escape` if the key has an escape: its text is shorter than in the file. */
static mls_code read_key(json_parser *p)
{
    if (!p->in_object || match_guessed_key(p)) {
        return MLS_OK;
    }
    const size_t start = p->at;
    if (byte_at(p, p->at) != '"') {
        return fail_unexpected(p, "a key in quotes");
    }
    if (read_string(p, &p->key) != MLS_OK) {
        return MLS_E_FORMAT;
    }
    p->has_escape = p->has_escape || p->at - start != p->key.length + 2;
    skip_space(p);
    if (byte_at(p, p->at) != ':') {
        return fail_unexpected(p, "':'");
    }
    p->at++;
    return MLS_OK;
}

/* Read the token after a value: a comma, with the key after it, or the closing bracket.
 * `first`: right after an opening bracket, so no comma precedes a member. Sets `*state`
 * to the next item to expect. */
static mls_code read_separator(json_parser *p, bool first, json_state *state)
{
    const int closer = p->in_object ? '}' : ']';
    const int c = byte_at(p, p->at);
    if (c == closer) {
        *state = JSON_HAS_VALUE;
        return close_container(p);
    }
    if (!first) {
        if (c != ',') {
            return fail_unexpected(p, p->in_object ? "',' or '}'" : "',' or ']'");
        }
        p->at++;
        skip_space(p);
    }
    *state = JSON_WANTS_VALUE;
    return read_key(p);
}

/* Parse the whole text. The loop needs only its state and the innermost open container,
 * so depth costs no stack. */
static mls_code parse_document(json_parser *p)
{
    json_state state = JSON_WANTS_VALUE;
    for (;;) {
        mls_code code;
        skip_space(p);
        if (state == JSON_WANTS_VALUE) {
            code = read_value(p, &state);
        } else if (p->open == MLS_JSON_NONE) {
            return p->at == p->end ? MLS_OK : fail_unexpected(p, "the end of the text");
        } else {
            code = read_separator(p, state == JSON_WANTS_MEMBER, &state);
        }
        if (code != MLS_OK) {
            return code;
        }
    }
}

/* Parse a text to a document. Nodes grow on demand, the scratch array to the largest
 * object. A text of n bytes costs n bytes for the copy, at most 30 for each value, and 8
 * for each member of the largest object. */
mls_code mls_json_parse(const char *text, size_t length, mls_json_limits limits,
                        mls_json **out, mls_status *st)
{
    if (length > MAX_TEXT) {
        return mls_fail_at(st, MAX_TEXT, "JSON is %zu bytes long: at most %zu are read",
                           length, MAX_TEXT);
    }
    json_parser p = {.limits = &limits,
                     .st = st,
                     .end = length,
                     .open = MLS_JSON_NONE,
                     .last = MLS_JSON_NONE,
                     .checked = MLS_JSON_NONE,
                     .guess = MLS_JSON_NONE};
    mls_code code = MLS_E_MEMORY;
    mls_json *doc = mls_alloc(1, sizeof *doc);
    if (doc == NULL || (doc->text = mls_alloc(length, 1)) == NULL) {
        mls_fail(st, MLS_E_MEMORY, "no memory for %zu bytes of JSON", length);
        goto done;
    }
    if (length > 0) {
        memcpy(doc->text, text, length);
    }
    p.doc = doc;
    code = parse_document(&p);
done:
    mls_free(p.scratch);
    if (code == MLS_OK) {
        *out = doc;
    } else {
        mls_json_free(doc);
    }
    return code;
}

void mls_json_forget(mls_json *doc)
{
    mls_free(doc->nodes);
    doc->nodes = NULL;
    doc->count = doc->room = 0;
}

/* Free a document. It has three blocks, regardless of the number of values. */
void mls_json_free(mls_json *doc)
{
    if (doc != NULL) {
        mls_free(doc->text);
        mls_free(doc->nodes);
        mls_free(doc);
    }
}

/* ---- access ----
 *
 * A document does not change after mls_json_parse returned it, so threads may share it.
 */

/* These functions do not check `node`: callers obtain it from the document. */
mls_json_type mls_json_type_of(const mls_json *doc, mls_json_node node)
{
    return (mls_json_type)doc->nodes[node].type;
}

/* Return whether `length` counts members instead of bytes. */
static bool is_container(const json_node *node)
{
    return node->type == MLS_JSON_OBJECT || node->type == MLS_JSON_ARRAY;
}

/* The position of the value, after its key. */
size_t mls_json_offset(const mls_json *doc, mls_json_node node)
{
    return doc->nodes[node].at;
}

/* Nodes are stored in file order, so the first member is the next node. */
mls_json_node mls_json_first(const mls_json *doc, mls_json_node parent)
{
    return mls_json_size(doc, parent) > 0 ? parent + 1 : MLS_JSON_NONE;
}

mls_json_node mls_json_next(const mls_json *doc, mls_json_node node)
{
    return doc->nodes[node].next;
}

size_t mls_json_size(const mls_json *doc, mls_json_node parent)
{
    const json_node *node = &doc->nodes[parent];
    return is_container(node) ? node->length : 0;
}

/* Return the member with a key, or MLS_JSON_NONE. Keys are compared after unescaping. A
 * key with a NUL character equals no C string. */
mls_json_node mls_json_find(const mls_json *doc, mls_json_node object, const char *key)
{
    if (mls_json_type_of(doc, object) != MLS_JSON_OBJECT) {
        return MLS_JSON_NONE;
    }
    mls_json_node member = mls_json_first(doc, object);
    while (member != MLS_JSON_NONE && !mls_str_is(mls_json_key(doc, member), key)) {
        member = mls_json_next(doc, member);
    }
    return member;
}

/* Return the index of the entry of `table` with that key, searched from index `next` on
 * and then from the start; `count` if none matches. */
static size_t find_table_entry(mls_str key, const mls_json_member *table, size_t count,
                               size_t next)
{
    for (size_t tries = 0; tries < count; tries++) {
        const size_t i = next + tries < count ? next + tries : next + tries - count;
        if (key.length == table[i].length &&
            same_bytes(key.data, table[i].key, key.length)) {
            return i;
        }
    }
    return count;
}

/* Find the members that a table lists. Search for each member from the entry after the
 * last match on. Members usually come in the order of the table, so each is compared
 * about once. */
size_t mls_json_members(const mls_json *doc, mls_json_node object, mls_json_member *table,
                        size_t count)
{
    size_t next = 0, bad = 0;
    for (size_t i = 0; i < count; i++) {
        table[i].node = MLS_JSON_NONE;
    }
    for (mls_json_node member = mls_json_first(doc, object); member != MLS_JSON_NONE;
         member = doc->nodes[member].next) {
        const json_node *node = &doc->nodes[member];
        const mls_str key = {doc->text + node->key, node->key_length};
        const size_t i = find_table_entry(key, table, count, next);
        if (i < count) {
            table[i].node = member;
            next = i + 1 < count ? i + 1 : 0;
        }
    }
    while (bad < count && (table[bad].node == MLS_JSON_NONE
                               ? !table[bad].needed
                               : doc->nodes[table[bad].node].type == table[bad].type)) {
        bad++;
    }
    return bad;
}

/* Members of arrays, and the root, have an empty key. */
mls_str mls_json_key(const mls_json *doc, mls_json_node node)
{
    const json_node *n = &doc->nodes[node];
    return (mls_str){.data = doc->text + n->key, .length = n->key_length};
}

/* Return the text of a string or number. A string starts after its quote and was
 * unescaped from there; a number starts at its offset. */
mls_str mls_json_text(const mls_json *doc, mls_json_node node)
{
    const json_node *n = &doc->nodes[node];
    if (n->type == MLS_JSON_STRING) {
        return (mls_str){.data = doc->text + n->at + 1, .length = n->length};
    }
    const bool is_number = n->type == MLS_JSON_NUMBER;
    return (mls_str){.data = doc->text + n->at, .length = is_number ? n->length : 0};
}

/* Convert a number to a uint64_t; false: it is not one. Accept digits only: a number with
 * a sign, a fraction or an exponent is neither a count nor an offset. Only the digits
 * after the first SAFE_DIGITS can overflow. */
bool mls_json_u64(const mls_json *doc, mls_json_node node, uint64_t *out)
{
    const mls_str text = mls_json_text(doc, node);
    if (mls_json_type_of(doc, node) != MLS_JSON_NUMBER) {
        return false;
    }
    uint64_t value = 0;
    for (size_t i = 0; i < text.length; i++) {
        const unsigned digit = (unsigned)(text.data[i] - '0');
        if (digit > 9 || (i >= SAFE_DIGITS && (!mls_u64_mul(value, 10, &value) ||
                                               !mls_u64_add(value, digit, &value)))) {
            return false;
        }
        value = i >= SAFE_DIGITS ? value : 10 * value + digit;
    }
    *out = value;
    return true;
}
