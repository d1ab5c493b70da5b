/* libFuzzer target: any bytes as a JSON document, within small limits.  Every node of an
 * accepted document is visited, so that a wrong length or link shows.
 *
 * tools/fuzz.sh builds it with clang -fsanitize=fuzzer,address,undefined and all of
 * csrc/core.
 */
#include "io/json_reader.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

/* Nodes are in file order, so a loop over their numbers visits all of them. */
static void check_node(const mls_json *doc, mls_json_node node, size_t size)
{
    size_t members = 0;
    uint64_t number;
    const mls_str text = mls_json_text(doc, node), key = mls_json_key(doc, node);
    require(mls_json_offset(doc, node) < size);
    require(mls_utf8_valid(key.data, key.length) && key.length <= size);
    require(mls_utf8_valid(text.data, text.length) && text.length <= size);
    (void)mls_json_u64(doc, node, &number);
    (void)mls_json_find(doc, node, "key");
    for (mls_json_node m = mls_json_first(doc, node); m != MLS_JSON_NONE;
         m = mls_json_next(doc, m)) {
        require(m > node);
        members++;
    }
    require(members == mls_json_size(doc, node));
}

/* The number of the last node, found without recursion: the last member of the last
 * member, and so on. */
static mls_json_node last_node(const mls_json *doc)
{
    mls_json_node node = 0;
    for (;;) {
        mls_json_node member = mls_json_first(doc, node);
        if (member == MLS_JSON_NONE) {
            return node;
        }
        while (mls_json_next(doc, member) != MLS_JSON_NONE) {
            member = mls_json_next(doc, member);
        }
        node = member;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    mls_json *doc = NULL;
    mls_status st;
    const mls_json_limits limits = {.depth = 32, .nodes = 1 << 12};
    const mls_code code = mls_json_parse((const char *)data, size, limits, &doc, &st);
    if (code != MLS_OK) {
        require(code == MLS_E_FORMAT && st.has_offset && st.offset <= size);
        require(doc == NULL && st.text[0] != '\0');
        return 0;
    }
    const mls_json_node last = last_node(doc);
    for (mls_json_node node = 0; node <= last; node++) {
        check_node(doc, node, size);
    }
    mls_json_free(doc);
    return 0;
}
