/* Indexes that lie: each is sealed, so that it is not the seal that refuses it. */
#include "index.h"
#include "runner.h"
#include "seal.h"

#include <stdlib.h>

enum { ROOM = 16384 };

/* A good index, in our own words: a parameter's part, a long one, a state with axes, one
 * without bytes. */
static const char good[] = MLS_SEAL_START
    ",\n\"format\":\"mlstate.index\",\"format_version\":1,"
    "\n\"generation\":\"0123456789abcdef\",\"rank\":3,\"world_size\":4,"
    "\n\"files\":["
    "\n{\"path\":\"params/"
    "w.safetensors\",\"bytes\":1052720,\"header_crc32c\":\"01234567\"}"
    ",\n{\"path\":\"optim_state/w.safetensors\",\"bytes\":4120,\"header_crc32c\":"
    "\"89abcdef\"}],"
    "\n\"shards\":["
    "\n{\"section\":\"params\",\"name\":\"long\",\"dtype\":\"U8\",\"shape\":[1048577],"
    "\"layout\":[],\"part\":0,\"version\":1,\"file\":0,\"offset\":4096,"
    "\"bytes\":1048577,\"crc32c\":\"11111111\",\"blocks\":\"2222222233333333\"},"
    "\n{\"section\":\"params\",\"name\":\"w\",\"dtype\":\"F32\",\"shape\":[4,6],"
    "\"layout\":[[0,2],[\"flat\",3]],\"part\":5,\"version\":7,\"file\":0,"
    "\"offset\":1052680,\"bytes\":16,\"crc32c\":\"fedcba98\"},"
    "\n{\"section\":\"optim_state\",\"name\":\"w\",\"state\":\"col\",\"dtype\":\"F16\","
    "\"shape\":[1,12],\"layout\":[],\"part\":0,\"axes\":[null,1],\"tier\":\"cold\","
    "\"version\":2,\"file\":1,\"offset\":4096,\"bytes\":24,\"crc32c\":\"00000001\"},"
    "\n{\"section\":\"optim_state\",\"name\":\"x.y\",\"state\":\"m\",\"dtype\":\"F64\","
    "\"shape\":[2],\"layout\":[[0,3]],\"part\":2,\"version\":1,\"file\":1,"
    "\"offset\":4120,\"bytes\":0,\"crc32c\":\"00000000\"}]}\n";

/* The good index with `to` in place of the first `from`, sealed.  Its length. */
static size_t change(const char *from, const char *to, char out[ROOM])
{
    const char *at = strstr(good, from);
    CHECK(at != NULL && strlen(good) + strlen(to) < ROOM);
    if (at == NULL) {
        printf("    the good index has no %s\n", from);
        at = good;
    }
    snprintf(out, ROOM, "%.*s%s%s", (int)(at - good), good, to, at + strlen(from));
    (void)mls_seal(out, strlen(out), &mls_crc_scalar);
    return strlen(out);
}

/* Parse from memory of exactly that length; the output must be untouched on failure. */
static mls_code parse(const char *text, size_t length, mls_status *st)
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

static void the_good_index_is_good(void)
{
    char text[ROOM];
    mls_status st;
    const size_t length = change("\"rank\":3", "\"rank\":3", text);
    CHECK(parse(text, length, &st) == MLS_OK);
}

/* A change that must be refused: the tensor blamed, and a word of the message. */
typedef struct lie {
    const char *from, *to, *name, *word;
} lie;

static void check_lies(const lie *lies, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        char text[ROOM];
        mls_status st;
        const size_t length = change(lies[i].from, lies[i].to, text);
        const mls_code code = parse(text, length, &st);
        const bool refused = code == MLS_E_FORMAT &&
                             strstr(st.text, lies[i].word) != NULL &&
                             strcmp(st.name, lies[i].name) == 0;
        if (!refused) {
            printf("    %s -> %s: %s (%s)\n", lies[i].from, lies[i].to,
                   code == MLS_OK ? "accepted" : st.text, st.name);
        }
        CHECK(refused);
    }
}

#define CHECK_LIES(lies) check_lies(lies, sizeof(lies) / sizeof((lies)[0]))

static void what_is_no_index_is_refused(void)
{
    static const lie lies[] = {
        {"\"format\":\"mlstate.index\"", "\"format\":\"mlstate.manifest\"", "", "format"},
        {"\"format\":\"mlstate.index\"", "\"format\":\"mlstate.index \"", "", "format"},
        {"\"format\":\"mlstate.index\"", "\"format\":\"\"", "", "format"},
        {"\"format\":\"mlstate.index\"", "\"format\":7", "", "not a string"},
        {"\"format\":\"mlstate.index\"", "\"form\":1", "", "missing"},
        {"\"format_version\":1", "\"format_version\":0", "", "newer"},
        {"\"format_version\":1", "\"format_version\":3", "", "newer"},
        {"\"format_version\":1", "\"format_version\":-1", "", "newer"},
        {"\"format_version\":1", "\"format_version\":1.0", "", "newer"},
        {"\"format_version\":1", "\"format_version\":1e0", "", "newer"},
        {"\"format_version\":1", "\"format_version\":\"1\"", "", "not a number"},
        {"\"format_version\":1", "\"format_version\":true", "", "not a number"},
        {"\"format_version\":1,", "", "", "missing"},
        /* a later version may lack anything else */
        {"\"format_version\":1,\n\"generation\"", "\"format_version\":3,\"g\"", "",
         "newer"},
        {",\n\"format\"", "}\n{\"format\"", "", "JSON"},
        {",\n\"format\"", "", "", "JSON"},
        {"]}\n", "]}x", "", "JSON"},
        {"]}\n", "]", "", "JSON"},
        {"\"rank\":3", "\"rank\":3,\"rank\":3", "rank", "twice"},
        {"\"rank\":3", "\"rank\":3,\"checksum\":\"\"", "checksum", "twice"},
        {"\"rank\":3", "\"rank\":3,\"\\u0072ank\":3", "rank", "twice"},
        {"\"rank\":3", "\"rank\":03", "", "JSON"},
        {"\"rank\":3", "\"rank\":NaN", "", "JSON"},
        {"\"name\":\"w\"", "\"name\":\"\\ud800\"", "", "surrogate"},
        {"\"name\":\"w\"", "\"name\":\"\xff\"", "", "UTF-8"},
        {"\"name\":\"w\"", "\"name\":\"\xed\xa0\x80\"", "", "UTF-8"},
        {"\"name\":\"w\"", "\"name\":\"\n\"", "", "control"},
        {"\"rank\":3", "\"x\":[[[[[[[[]]]]]]]],\"rank\":3", "", "deep"},
    };
    CHECK_LIES(lies);
}

static void heads_that_lie_are_refused(void)
{
    static const lie lies[] = {
        {"\"generation\":", "\"gen\":", "", "missing"},
        {"0123456789abcdef", "0123456789abcde", "", "16"},
        {"0123456789abcdef", "0123456789abcdef0", "", "16"},
        {"0123456789abcdef", "0123456789abcdeF", "", "16"},
        {"0123456789abcdef", "../../../../etc/", "", "16"},
        {"0123456789abcdef", "01234567\\u000089abcde", "", "16"},
        {"0123456789abcdef", "", "", "16"},
        {"\"0123456789abcdef\"", "81985529216486895", "", "not a string"},
        {"\"0123456789abcdef\"", "null", "", "not a string"},
        {"\"rank\":3,", "", "", "missing"},
        {"\"rank\":3", "\"rank\":4", "", "range"},
        {"\"rank\":3", "\"rank\":-1", "", "range"},
        {"\"rank\":3", "\"rank\":-0", "", "range"},
        {"\"rank\":3", "\"rank\":3.0", "", "range"},
        {"\"rank\":3", "\"rank\":3e0", "", "range"},
        {"\"rank\":3", "\"rank\":18446744073709551619", "", "range"},
        {"\"rank\":3", "\"rank\":\"3\"", "", "not a number"},
        {"\"rank\":3", "\"rank\":false", "", "not a number"},
        {"\"world_size\":4,", "", "", "missing"},
        {"\"world_size\":4", "\"world_size\":0", "", "range"},
        {"\"world_size\":4", "\"world_size\":3", "", "range"},
        {"\"world_size\":4", "\"world_size\":16777217", "", "range"},
        {"\"world_size\":4", "\"world_size\":[4]", "", "not a number"},
        {"\"files\":[", "\"file\":[", "", "missing"},
        {"\"shards\":[", "\"shard\":[", "", "missing"},
        {"\"files\":[", "\"files\":null,\"old\":[", "", "not an array"},
        {"\"files\":[", "\"files\":{},\"old\":[", "", "not an array"},
        {"\"shards\":[", "\"shards\":\"\",\"old\":[", "", "not an array"},
        {"\"files\":[", "\"files\":[null,", "", "no object"},
        {"\"files\":[", "\"files\":[[],", "", "no object"},
        {"\"files\":[", "\"files\":[\"params/v.safetensors\",", "", "no object"},
        {"\"files\":[", "\"files\":[{},", "", "missing"},
        {"\"shards\":[", "\"shards\":[null,", "", "no object"},
        {"\"shards\":[", "\"shards\":[0,", "", "no object"},
        {"\"shards\":[", "\"shards\":[[],", "", "no object"},
        {"\"shards\":[", "\"shards\":[{},", "", "missing"},
    };
    CHECK_LIES(lies);
}

static void paths_that_lead_elsewhere_are_refused(void)
{
    static const char *const paths[] = {
        "",
        "params",
        "params/",
        "/",
        "params/.safetensors",
        "params/safetensors",
        "w.safetensors",
        "../w.safetensors",
        "../params/w.safetensors",
        "params/../w.safetensors",
        "params/../../w.safetensors",
        "params/./w.safetensors",
        "./params/w.safetensors",
        "params//w.safetensors",
        "params/a/w.safetensors",
        "/params/w.safetensors",
        "/etc/w.safetensors",
        "//params/w.safetensors",
        "params/.w.safetensors",
        "params/...safetensors",
        "params\\\\w.safetensors",
        "params/a\\\\w.safetensors",
        "params/c:w.safetensors",
        "params/W.safetensors",
        "Params/w.safetensors",
        "PARAMS/w.safetensors",
        "params/w.Safetensors",
        "params/w.safetensor",
        "params/w.safetensorsx",
        "params/w.safetensors/",
        "params/w.safetensors ",
        "params/w.safetensors\\u0000",
        "params/w\\u0000.safetensors",
        "params\\u0000/w.safetensors",
        "params/w\\n.safetensors",
        "params/w .safetensors",
        "params/w%2e.safetensors",
        "params/$w.safetensors",
        "params/w*.safetensors",
        "params/w\xc3\xa9.safetensors",
        "params/w\\u00e9.safetensors",
        "params/w\xef\xbc\x8f.safetensors",
        "param/w.safetensors",
        "paramsx/w.safetensors",
        "index/w.safetensors",
        "roots/w.safetensors",
        "optim_state.safetensors",
        "optim_state/../params/w.safetensors",
        "manifest.json",
        "file:///params/w.safetensors",
    };
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
        const lie one = {"params/w.safetensors", paths[i], "", "path"};
        check_lies(&one, 1);
    }
    /* one byte more than there is room for */
    char path[MLS_PATH_BYTES + 2];
    memset(path, 'x', MLS_PATH_BYTES + 1);
    memcpy(path, "params/", 7);
    memcpy(path + MLS_PATH_BYTES + 1 - 12, ".safetensors", 13);
    const lie longer = {"params/w.safetensors", path, "", "path"};
    check_lies(&longer, 1);
}

static void files_that_lie_are_refused(void)
{
    static const lie lies[] = {
        {"{\"path\":\"params/w.safetensors\",", "{", "", "missing"},
        {"\"params/w.safetensors\"", "7", "", "not a string"},
        {"\"params/w.safetensors\"", "[\"params/w.safetensors\"]", "", "not a string"},
        {"\"bytes\":1052720,", "", "", "missing"},
        {"\"bytes\":1052720", "\"bytes\":7", "", "range"},
        {"\"bytes\":1052720", "\"bytes\":-1052720", "", "range"},
        {"\"bytes\":1052720", "\"bytes\":9223372036854775808", "", "range"},
        {"\"bytes\":1052720", "\"bytes\":18446744073709551616", "", "range"},
        {"\"bytes\":1052720", "\"bytes\":1052720.5", "", "range"},
        {"\"bytes\":1052720", "\"bytes\":\"1052720\"", "", "not a number"},
        {"\"bytes\":1052720", "\"bytes\":null", "", "not a number"},
        {"\"bytes\":1052720", "\"bytes\":1052695", "w", "end of the file"},
        {"\"bytes\":4120", "\"bytes\":4119", "w", "end of the file"},
        {",\"header_crc32c\":\"01234567\"", "", "", "missing"},
        {"\"01234567\"", "\"0123456\"", "", "8 hex"},
        {"\"01234567\"", "\"012345678\"", "", "8 hex"},
        {"\"01234567\"", "\"0123456X\"", "", "8 hex"},
        {"\"01234567\"", "\"0123456A\"", "", "8 hex"},
        {"\"01234567\"", "\"\"", "", "8 hex"},
        {"\"01234567\"", "19088743", "", "not a string"},
        {"optim_state/w.safetensors", "params/w.safetensors", "", "twice"},
    };
    CHECK_LIES(lies);
}

static void shards_of_the_wrong_kind_are_refused(void)
{
    static const lie lies[] = {
        {"{\"section\":\"params\",", "{", "long", "missing"},
        {"\"params\",\"name\":\"w\"", "\"param\",\"name\":\"w\"", "w", "section"},
        {"\"params\",\"name\":\"w\"", "\"\",\"name\":\"w\"", "w", "section"},
        {"\"params\",\"name\":\"w\"", "0,\"name\":\"w\"", "w", "not a string"},
        {"\"name\":\"w\",\"dtype\"", "\"dtype\"", "", "missing"},
        {"\"name\":\"w\"", "\"name\":null", "", "not a string"},
        {"\"name\":\"w\"", "\"name\":[\"w\"]", "", "not a string"},
        {"\"name\":\"w\"", "\"name\":\"w\",\"state\":\"m\"", "w", "state"},
        {"\"name\":\"w\"", "\"name\":\"w\",\"state\":\"\"", "w", "state"},
        {"\"state\":\"col\"", "\"state\":\"c.l\"", "w", "dot"},
        {"\"state\":\"col\"", "\"state\":\".\"", "w", "dot"},
        {"\"state\":\"col\"", "\"state\":null", "w", "not a string"},
        {"\"state\":\"m\",", "", "x.y", "dot"},
        {"\"dtype\":\"F32\",", "", "w", "missing"},
        {"\"dtype\":\"F32\"", "\"dtype\":\"f32\"", "w", "dtype"},
        {"\"dtype\":\"F32\"", "\"dtype\":\"float32\"", "w", "dtype"},
        {"\"dtype\":\"F32\"", "\"dtype\":\"F32\\u0000\"", "w", "dtype"},
        {"\"dtype\":\"F32\"", "\"dtype\":\"\"", "w", "dtype"},
        {"\"dtype\":\"F32\"", "\"dtype\":32", "w", "not a string"},
        {"\"tier\":\"cold\"", "\"tier\":\"frozen\"", "w", "tier"},
        {"\"tier\":\"cold\"", "\"tier\":\"\"", "w", "tier"},
        {"\"tier\":\"cold\"", "\"tier\":null", "w", "not a string"},
        {"\"version\":7,", "", "w", "missing"},
        {"\"version\":7", "\"version\":0", "w", "range"},
        {"\"version\":7", "\"version\":-7", "w", "range"},
        {"\"version\":7", "\"version\":9223372036854775808", "w", "range"},
        {"\"version\":7", "\"version\":\"7\"", "w", "not a number"},
    };
    CHECK_LIES(lies);
}

static void shapes_that_lie_are_refused(void)
{
    static const lie lies[] = {
        {"\"shape\":[4,6],", "", "w", "missing"},
        {"\"shape\":[4,6]", "\"shape\":24", "w", "not an array"},
        {"\"shape\":[4,6]", "\"shape\":\"46\"", "w", "not an array"},
        {"\"shape\":[4,6]", "\"shape\":{\"0\":4,\"1\":6}", "w", "not an array"},
        {"\"shape\":[4,6]", "\"shape\":[4,\"6\"]", "w", "dimension"},
        {"\"shape\":[4,6]", "\"shape\":[4,-6]", "w", "dimension"},
        {"\"shape\":[4,6]", "\"shape\":[4,6.0]", "w", "dimension"},
        {"\"shape\":[4,6]", "\"shape\":[4,6e0]", "w", "dimension"},
        {"\"shape\":[4,6]", "\"shape\":[4,null]", "w", "dimension"},
        {"\"shape\":[4,6]", "\"shape\":[4,[6]]", "w", "dimension"},
        {"\"shape\":[4,6]", "\"shape\":[4,18446744073709551622]", "w", "dimension"},
        {"\"shape\":[4,6]", "\"shape\":[4,6,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "w", "many"},
        {"\"shape\":[4,6]", "\"shape\":[4294967296,4294967296]", "w", "memory"},
        {"\"shape\":[4,6]", "\"shape\":[4,6,3074457345618258603]", "w", "memory"},
        {"\"shape\":[4,6]", "\"shape\":[2305843009213693952]", "w", "memory"},
        {"\"shape\":[4,6]", "\"shape\":[0,18446744073709551615]", "w", "memory"},
        {"\"shape\":[4,6]", "\"shape\":[4294967296,0,4294967296]", "w", "memory"},
        {"\"shape\":[4,6]", "\"shape\":[4,9]", "w", "bytes"},
        {"\"shape\":[4,6]", "\"shape\":[]", "w", "layout"},
        {"\"shape\":[2]", "\"shape\":[3]", "x.y", "bytes"},
        {"\"bytes\":16", "\"bytes\":15", "w", "bytes"},
        {"\"bytes\":16", "\"bytes\":17", "w", "bytes"},
        {"\"bytes\":16", "\"bytes\":0", "w", "bytes"},
        {"\"bytes\":16", "\"bytes\":96", "w", "end of the file"},
        {"\"bytes\":16", "\"bytes\":-16", "w", "range"},
        {"\"bytes\":16", "\"bytes\":18446744073709551615", "w", "end of the file"},
        {"\"bytes\":16", "\"bytes\":18446744073709551616", "w", "range"},
        {"\"bytes\":16", "\"bytes\":null", "w", "not a number"},
        {"\"bytes\":16,", "", "w", "missing"},
        {"\"bytes\":0", "\"bytes\":8", "x.y", "end of the file"},
    };
    CHECK_LIES(lies);
}

static void layouts_that_lie_are_refused(void)
{
#define LAYOUT "\"layout\":[[0,2],[\"flat\",3]]"
    static const lie lies[] = {
        {LAYOUT ",", "", "w", "missing"},
        {LAYOUT, "\"layout\":null", "w", "not an array"},
        {LAYOUT, "\"layout\":\"rows\"", "w", "not an array"},
        {LAYOUT, "\"layout\":[0,2]", "w", "step"},
        {LAYOUT, "\"layout\":[\"flat\",6]", "w", "step"},
        {LAYOUT, "\"layout\":[[0]]", "w", "step"},
        {LAYOUT, "\"layout\":[[]]", "w", "step"},
        {LAYOUT, "\"layout\":[[0,6,1]]", "w", "step"},
        {LAYOUT, "\"layout\":[{\"0\":6,\"1\":6}]", "w", "step"},
        {LAYOUT, "\"layout\":[null]", "w", "step"},
        {LAYOUT, "\"layout\":[[\"rows\",6]]", "w", "step"},
        {LAYOUT, "\"layout\":[[\"\",6]]", "w", "step"},
        {LAYOUT, "\"layout\":[[\"0\",6]]", "w", "step"},
        {LAYOUT, "\"layout\":[[null,6]]", "w", "step"},
        {LAYOUT, "\"layout\":[[-1,6]]", "w", "step"},
        {LAYOUT, "\"layout\":[[0.0,6]]", "w", "step"},
        {LAYOUT, "\"layout\":[[16,6]]", "w", "step"},
        {LAYOUT, "\"layout\":[[18446744073709551615,6]]", "w", "step"},
        {LAYOUT, "\"layout\":[[0,-6]]", "w", "step"},
        {LAYOUT, "\"layout\":[[0,\"6\"]]", "w", "step"},
        {LAYOUT, "\"layout\":[[0,18446744073709551622]]", "w", "step"},
        {LAYOUT, "\"layout\":[[0,0]]", "w", "layout"},
        {LAYOUT, "\"layout\":[[0,5]]", "w", "layout"},
        {LAYOUT, "\"layout\":[[2,6]]", "w", "layout"},
        {LAYOUT, "\"layout\":[[\"flat\",3],[0,2]]", "w", "layout"},
        {LAYOUT, "\"layout\":[[\"flat\",3],[\"flat\",2]]", "w", "layout"},
        {LAYOUT, "\"layout\":[[0,1],[0,1],[0,1],[0,2],[\"flat\",3]]", "w", "many"},
        {LAYOUT, "\"layout\":[[0,4294967296],[1,4294967296]]", "w", "layout"},
        {LAYOUT, "\"layout\":[]", "w", "layout"},
        {"\"part\":5,", "", "w", "missing"},
        {"\"part\":5", "\"part\":6", "w", "layout"},
        {"\"part\":5", "\"part\":-1", "w", "range"},
        {"\"part\":5", "\"part\":5.0", "w", "range"},
        {"\"part\":5", "\"part\":9223372036854775807", "w", "layout"},
        {"\"part\":5", "\"part\":9223372036854775808", "w", "range"},
        {"\"part\":5", "\"part\":\"5\"", "w", "not a number"},
        {"\"axes\":[null,1]", "\"axes\":[null]", "w", "as many"},
        {"\"axes\":[null,1]", "\"axes\":[]", "w", "as many"},
        {"\"axes\":[null,1]", "\"axes\":[null,1,2]", "w", "as many"},
        {"\"axes\":[null,1]", "\"axes\":[null,16]", "w", "axis"},
        {"\"axes\":[null,1]", "\"axes\":[null,-1]", "w", "axis"},
        {"\"axes\":[null,1]", "\"axes\":[null,1.0]", "w", "axis"},
        {"\"axes\":[null,1]", "\"axes\":[null,\"1\"]", "w", "axis"},
        {"\"axes\":[null,1]", "\"axes\":[null,[]]", "w", "axis"},
        {"\"axes\":[null,1]", "\"axes\":[null,false]", "w", "axis"},
        {"\"axes\":[null,1]", "\"axes\":null", "w", "not an array"},
        {"\"axes\":[null,1]", "\"axes\":\"01\"", "w", "not an array"},
    };
    CHECK_LIES(lies);
}

static void places_that_lie_are_refused(void)
{
    static const lie lies[] = {
        {"\"file\":0,\"offset\":1052680", "\"offset\":1052680", "w", "missing"},
        {"\"file\":0,\"offset\":1052680", "\"file\":2,\"offset\":1052680", "w", "files"},
        {"\"file\":0,\"offset\":1052680", "\"file\":-1,\"offset\":1052680", "w", "range"},
        {"\"file\":0,\"offset\":1052680", "\"file\":\"0\",\"offset\":1052680", "w",
         "not a number"},
        {"\"file\":0,\"offset\":1052680",
         "\"file\":18446744073709551615,\"offset\":1052680", "w", "files"},
        {"\"file\":0,\"offset\":1052680", "\"file\":1,\"offset\":1052680", "w",
         "end of the file"},
        {"\"offset\":1052680,", "", "w", "missing"},
        {"\"offset\":1052680", "\"offset\":7", "w", "range"},
        {"\"offset\":1052680", "\"offset\":-8", "w", "range"},
        {"\"offset\":1052680", "\"offset\":1052705", "w", "end of the file"},
        {"\"offset\":1052680", "\"offset\":9223372036854775807", "w", "end of the file"},
        {"\"offset\":1052680", "\"offset\":9223372036854775808", "w", "range"},
        {"\"offset\":1052680", "\"offset\":18446744073709551600", "w", "range"},
        {"\"offset\":1052680", "\"offset\":1052680.0", "w", "range"},
        {"\"offset\":1052680", "\"offset\":null", "w", "not a number"},
        {"\"offset\":4120", "\"offset\":4121", "x.y", "end of the file"},
        /* inside the other one, at its start, over its start, over its end */
        {"\"offset\":1052680", "\"offset\":8192", "w", "inside another"},
        {"\"offset\":1052680", "\"offset\":4096", "w", "inside another"},
        {"\"offset\":1052680", "\"offset\":4088", "long", "inside another"},
        {"\"offset\":1052680", "\"offset\":1052672", "w", "inside another"},
    };
    CHECK_LIES(lies);
}

static void checksums_that_lie_are_refused(void)
{
#define BLOCKS "\"blocks\":\"2222222233333333\""
    static const lie lies[] = {
        {",\"crc32c\":\"fedcba98\"", "", "w", "missing"},
        {"\"fedcba98\"", "\"fedcba9\"", "w", "8 hex"},
        {"\"fedcba98\"", "\"fedcba987\"", "w", "8 hex"},
        {"\"fedcba98\"", "\"fedcba9g\"", "w", "8 hex"},
        {"\"fedcba98\"", "\"FEDCBA98\"", "w", "8 hex"},
        {"\"fedcba98\"", "\"\"", "w", "8 hex"},
        {"\"fedcba98\"", "4275878552", "w", "not a string"},
        {"\"00000000\"}]}", "\"00000001\"}]}", "x.y", "no bytes"},
        {"," BLOCKS, "", "long", "missing"},
        {BLOCKS, "\"blocks\":\"\"", "long", "MiB"},
        {BLOCKS, "\"blocks\":\"22222222\"", "long", "MiB"},
        {BLOCKS, "\"blocks\":\"222222223333333\"", "long", "MiB"},
        {BLOCKS, "\"blocks\":\"22222222333333334\"", "long", "MiB"},
        {BLOCKS, "\"blocks\":\"222222223333333344444444\"", "long", "MiB"},
        {BLOCKS, "\"blocks\":\"222222223333333X\"", "long", "hexadecimal"},
        {BLOCKS, "\"blocks\":\"222222223333333A\"", "long", "hexadecimal"},
        {BLOCKS, "\"blocks\":[\"22222222\",\"33333333\"]", "long", "not a string"},
        {BLOCKS, "\"blocks\":null", "long", "not a string"},
        {"\"crc32c\":\"fedcba98\"", "\"crc32c\":\"fedcba98\",\"blocks\":\"fedcba98\"",
         "w", "no longer"},
        {"\"crc32c\":\"fedcba98\"", "\"crc32c\":\"fedcba98\",\"blocks\":\"\"", "w",
         "no longer"},
    };
    CHECK_LIES(lies);
}

static void duplicates_are_refused(void)
{
    static const lie lies[] = {
        /* the same part twice, with another place and without bytes */
        {"{\"section\":\"optim_state\",\"name\":\"x.y\"",
         "{\"section\":\"optim_state\",\"name\":\"x.y\",\"state\":\"m\",\"dtype\":"
         "\"F64\",\"shape\":[2],\"layout\":[[0,3]],\"part\":2,\"version\":5,\"file\":0,"
         "\"offset\":4096,\"bytes\":0,\"crc32c\":\"00000000\"},"
         "{\"section\":\"optim_state\",\"name\":\"x.y\"",
         "x.y", "twice"},
        {"\"name\":\"w\"", "\"name\":\"w\",\"name\":\"w\"", "name", "twice"},
        {"\"name\":\"w\"", "\"name\":\"w\",\"x\":1,\"x\":2", "x", "twice"},
    };
    CHECK_LIES(lies);
}

static void every_value_may_be_anything_else(void)
{
    /* each value of the good index, by another value: refused, or good; never worse */
    static const char *const values[] = {
        "null",   "true",
        "0",      "-1",
        "1e308",  "18446744073709551615",
        "\"\"",   "\"\\u0000\"",
        "[]",     "{}",
        "[[[]]]", "{\"a\":{}}",
        "[0,0]",  "\"0000000000000000\"",
    };
    size_t refused = 0, all = 0;
    for (const char *at = good + sizeof MLS_SEAL_START; *at != '\0'; at++) {
        /* what begins behind a colon, a bracket or a comma, up to the next such mark */
        const size_t length = strcspn(at, ",:[]{}\n");
        if (strchr(":[,", at[-1]) == NULL || length == 0 || at[length] == ':') {
            continue;
        }
        for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
            char text[ROOM];
            mls_status st;
            snprintf(text, sizeof text, "%.*s%s%s", (int)(at - good), good, values[i],
                     at + length);
            (void)mls_seal(text, strlen(text), &mls_crc_scalar);
            const mls_code code = parse(text, strlen(text), &st);
            CHECK(code == MLS_OK || code == MLS_E_FORMAT);
            refused += code != MLS_OK;
            all++;
        }
    }
    CHECK(all > 700 && refused > all * 3 / 4);
}

static void every_piece_that_is_missing_is_missed(void)
{
    /* the good index without one of its bytes, sealed: never worse than refused */
    for (size_t skip = sizeof MLS_SEAL_START - 1; skip < sizeof good - 1; skip++) {
        char text[ROOM];
        mls_status st;
        snprintf(text, sizeof text, "%.*s%s", (int)skip, good, good + skip + 1);
        (void)mls_seal(text, strlen(text), &mls_crc_scalar);
        const mls_code code = parse(text, strlen(text), &st);
        CHECK(code == MLS_OK || code == MLS_E_FORMAT);
    }
    for (size_t length = sizeof MLS_SEAL_START - 1; length < sizeof good - 2; length++) {
        char text[ROOM];
        mls_status st;
        memcpy(text, good, length);
        (void)mls_seal(text, length, &mls_crc_scalar);
        CHECK(parse(text, length, &st) == MLS_E_FORMAT);
    }
}

static const test_case tests[] = {
    TEST(the_good_index_is_good),
    TEST(what_is_no_index_is_refused),
    TEST(heads_that_lie_are_refused),
    TEST(paths_that_lead_elsewhere_are_refused),
    TEST(files_that_lie_are_refused),
    TEST(shards_of_the_wrong_kind_are_refused),
    TEST(shapes_that_lie_are_refused),
    TEST(layouts_that_lie_are_refused),
    TEST(places_that_lie_are_refused),
    TEST(checksums_that_lie_are_refused),
    TEST(duplicates_are_refused),
    TEST(every_value_may_be_anything_else),
    TEST(every_piece_that_is_missing_is_missed),
};

int main(void)
{
    return RUN_TESTS(tests);
}
