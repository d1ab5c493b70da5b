/* False indexes: each has a correct checksum, so that another rule refuses it. */
#include "support/index_text.h"

/* A good index: a parameter's part, a long one, a state with axes, and one without
 * bytes. */
#define FILES                                                                            \
    "\n\"path\":[\"params/w.safetensors\",\"optim_state/w.safetensors\"],"               \
    "\n\"bytes\":\"1052720,4120\",\n\"header_crc32c\":\"0123456789abcdef\""
#define SHARDS                                                                           \
    "\n\"name\":[\"long\",\"w\",\"w\",\"x.y\"],\n\"kind\":\"0,1,2,3\","                  \
    "\n\"shape\":\"1048577;4,6;1,12;2;\",\n\"part\":\"0,5,0,2\","                        \
    "\n\"version\":\"1,7,2,1\""
#define LAYERS                                                                           \
    "\n\"file\":\"0,0,1,1\",\n\"offset\":\"4096,1052680,4096,4120\","                    \
    "\n\"bytes\":\"1048577,16,24,0\","                                                   \
    "\n\"crc32c\":\"11111111fedcba980000000100000000\","                                 \
    "\n\"blocks\":\"2222222233333333\""
static const char good[] = MLS_JSON_CHECKSUM_START
    ",\n\"format\":\"mlstate.index\",\"format_version\":3,"
    "\n\"generation\":\"0123456789abcdef\",\"rank\":3,\"world_size\":4,"
    "\n\"files\":{" FILES "},\n\"kinds\":["
    "\n{\"section\":\"params\",\"dtype\":\"U8\",\"layout\":[]},"
    "\n{\"section\":\"params\",\"dtype\":\"F32\",\"layout\":[[0,2],[\"flat\",3]]},"
    "\n{\"section\":\"optim_state\",\"state\":\"col\",\"dtype\":\"F16\",\"layout\":[],"
    "\"axes\":[null,1],\"tier\":\"cold\"},"
    "\n{\"section\":\"optim_state\",\"state\":\"m\",\"dtype\":\"F64\","
    "\"layout\":[[0,3]]}],\n\"shards\":{" SHARDS "},\n\"layers\":{" LAYERS "}}\n";

TEST(unmodified_index_is_accepted)
{
    char text[INDEX_ROOM];
    const size_t length = change_index(good, "\"rank\":3", "\"rank\":3", text);
    CHECK(parse_index(text, length, &status) == MLS_OK);
}

TEST(other_documents_are_refused)
{
    static const lie lies[] = {
        {"\"format\":\"mlstate.index\"", "\"format\":\"mlstate.index \"", "",
         "\"format\" is not \"mlstate.index\""},
        {"\"format_version\":3", "\"format_version\":4", "",
         "\"format_version\" 4 is not supported: this mlstate reads version 3"},
        {"\"format_version\":3", "\"format_version\":true", "",
         "\"format_version\" is not a number"},
        {"\"format_version\":3,", "", "", "\"format_version\" is missing"},
        /* a later version may lack any other member */
        {"\"format_version\":3,\n\"generation\"", "\"format_version\":4,\"g\"", "",
         "\"format_version\" 4 is not supported: this mlstate reads version 3"},
        {"\"rank\":3", "\"x\":[[[[[[[[]]]]]]]],\"rank\":3", "",
         "JSON is nested more than 8 levels deep"},
    };
    CHECK_LIES(lies);
}

TEST(bad_head_members_are_refused)
{
#define NO_GENERATION "\"generation\" is not 16 hexadecimal digits"
    static const lie lies[] = {
        {"0123456789abcdef", "0123456789abcdef0", "", NO_GENERATION},
        {"0123456789abcdef", "0123456789abcdeF", "", NO_GENERATION},
        {"0123456789abcdef", "Z123456789abcdef", "", NO_GENERATION},
        {"\"rank\":3", "\"rank\":4", "", OUT_OF_RANGE("rank")},
        {"\"world_size\":4", "\"world_size\":3", "", OUT_OF_RANGE("rank")},
        {"\"world_size\":4", "\"world_size\":16777217", "", OUT_OF_RANGE("world_size")},
        {"\"files\":{", "\"files\":[],\"old\":{", "", "\"files\" is not an object"},
        {"\"kinds\":[", "\"kinds\":{},\"old\":[", "", "\"kinds\" is not an array"},
        {"\"kinds\":[", "\"kinds\":[null,", "", "\"kinds\" must contain objects"},
        {"\"kinds\":[", "\"kinds\":[{},", "", "\"section\" is missing"},
    };
    CHECK_LIES(lies);
}

TEST(bad_file_entries_are_refused)
{
    static const lie lies[] = {
        {"params/w.safetensors", "params/../w.safetensors", "",
         "\"path\" is not the path of a shard file"},
        {"\"params/w.safetensors\"", "7", "", "\"path\" is not a string"},
        {"\"params/w.safetensors\",", "", "", EXTRA("bytes")},
        {"\"path\":[", "\"path\":[\"params/v.safetensors\",", "", TOO_FEW("bytes")},
        {"1052720,4120", "7,4120", "", OUT_OF_RANGE("bytes")},
        {"1052720,4120", "9223372036854775808,4120", "", OUT_OF_RANGE("bytes")},
        {"1052720,4120", "1052695,4120", "w", BEYOND_FILE},
        {"1052720,4120", "1052720,4120,", "", EXTRA("bytes")},
        {"\"0123456789abcdef\"}", "\"0123456789abcde\"}", "",
         "\"header_crc32c\" must have 8 digits for each of its values"},
        {"\"0123456789abcdef\"}", "\"0123456789abcdef0\"}", "", EXTRA("header_crc32c")},
        {"\"0123456789abcdef\"}", "\"0123456A89abcdef\"}", "", NO_HEX("header_crc32c")},
        {"optim_state/w.safetensors", "params/w.safetensors", "",
         "\"path\" appears twice among the files"},
    };
    CHECK_LIES(lies);
}

TEST(bad_shard_kinds_are_refused)
{
#define NO_AXES "\"axes\" must contain only axes or null"
#define F32     "\"section\":\"params\",\"dtype\":\"F32\""
    static const lie lies[] = {
        {F32, "\"section\":\"param\",\"dtype\":\"F32\"", "",
         "\"section\" is not \"params\", \"optim_state\" or \"states\""},
        {F32, F32 ",\"state\":\"m\"", "",
         "\"state\" outside the section \"optim_state\""},
        {"\"state\":\"col\"", "\"state\":\"c.l\"", "", "\"state\" has a dot"},
        {"\"state\":\"m\",", "", "x.y", "\"name\" has a dot"},
        {"\"dtype\":\"F32\"", "\"dtype\":\"F32\\u0000\"", "", "\"dtype\" is unknown"},
        {"\"dtype\":\"F32\"", "\"dtype\":\"f32\"", "", "\"dtype\" is unknown"},
        {"\"dtype\":\"F32\"", "\"dtype\":\"F3\"", "", "\"dtype\" is unknown"},
        {"\"dtype\":\"F32\"", "\"dtype\":32", "", "\"dtype\" is not a string"},
        {"\"tier\":\"cold\"", "\"tier\":\"frozen\"", "",
         "\"tier\" is not \"hot\", \"warm\" or \"cold\""},
        {"\"axes\":[null,1]", "\"axes\":[null,1,2]", "w",
         "\"axes\" must have one entry for each dimension of the shape"},
        {"\"axes\":[null,1]", "\"axes\":[null,16]", "", NO_AXES},
        {"\"axes\":[null,1]", "\"axes\":[null,-2]", "", NO_AXES},
        {"\"axes\":[null,1]", "\"axes\":[null,\"1\"]", "", NO_AXES},
        {"\"axes\":[null,1]", "\"axes\":[null,true]", "", NO_AXES},
        {"\"axes\":[null,1]", "\"axes\":[[],1]", "", NO_AXES},
        {"\"axes\":[null,1]", "\"axes\":[null,18446744073709551616]", "", NO_AXES},
        {"\"axes\":[null,1]", "\"axes\":{\"0\":0}", "", "\"axes\" is not an array"},
    };
    CHECK_LIES(lies);
}

#define NO_PART "\"layout\" is invalid or does not have this part"
#define NO_FIT  "\"layout\" does not fit the shape"

TEST(bad_shards_are_refused)
{
    static const lie lies[] = {
        {"\"name\":[", "\"name\":[\"v\",", "x.y", TOO_FEW("kind")},
        {"\"name\":[\"long\",", "\"name\":[", "", EXTRA("kind")},
        {"\"w\",\"w\"", "null,\"w\"", "", "\"name\" is not a string"},
        {"0,1,2,3", "0,4,2,3", "w", "\"kind\" is not one of the kinds"},
        {"1,7,2,1", "1,0,2,1", "w", OUT_OF_RANGE("version")},
        {"1,7,2,1", "1,9223372036854775808,2,1", "w", OUT_OF_RANGE("version")},
        {"1,7,2,1", "1,7,2,1,1", "", EXTRA("version")},
        {"0,5,0,2", "0,6,0,2", "w", NO_PART},
        {"0,5,0,2", "0,9223372036854775808,0,2", "w", OUT_OF_RANGE("part")},
        {"0,5,0,2", "0,5,0", "x.y", TOO_FEW("part")},
    };
    CHECK_LIES(lies);
}

TEST(bad_shapes_are_refused)
{
    static const lie lies[] = {
        {";2;", ";2", "x.y", "\"shape\" must have a \";\" after each shape"},
        {";2;", ";2;2;", "", EXTRA("shape")},
        {"4,6", "4,6,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1", "w",
         "\"shape\" has too many dimensions"},
        {"4,6", "4294967296,4294967296", "w", "\"shape\" is larger than memory"},
        {"4,6", "0,9223372036854775807", "w", "\"shape\" is larger than memory"},
        {"4,6", "4,9", "w", WRONG_BYTES},
        {"4,6", "", "w", NO_FIT},
        {"1048577,16,", "1048577,15,", "w", WRONG_BYTES},
        {"1048577,16,", "1048577,17,", "w", WRONG_BYTES},
        {"1048577,16,", "1048577,96,", "w", BEYOND_FILE},
        {"24,0\"", "24,8\"", "x.y", BEYOND_FILE},
    };
    CHECK_LIES(lies);
}

TEST(bad_layouts_are_refused)
{
#define NO_STEP "\"layout\" has a step that is not [axis or name, parts]"
#define LAYOUT  "\"layout\":[[0,2],[\"flat\",3]]"
    static const lie lies[] = {
        {LAYOUT, "\"layout\":\"rows\"", "", "\"layout\" is not an array"},
        {LAYOUT, "\"layout\":[[0]]", "", NO_STEP},
        {LAYOUT, "\"layout\":[[0,6,1]]", "", NO_STEP},
        {LAYOUT, "\"layout\":[{\"0\":6,\"1\":6}]", "", NO_STEP},
        {LAYOUT, "\"layout\":[[\"rows\",6]]", "", NO_STEP},
        {LAYOUT, "\"layout\":[[16,6]]", "", NO_STEP},
        {LAYOUT, "\"layout\":[[-1,6]]", "", NO_STEP},
        {LAYOUT, "\"layout\":[[0,0]]", "w", NO_PART},
        {LAYOUT, "\"layout\":[[0,-1]]", "", NO_STEP},
        {LAYOUT, "\"layout\":[[0,\"6\"]]", "", NO_STEP},
        {LAYOUT, "\"layout\":[[0,6.0]]", "", NO_STEP},
        {LAYOUT, "\"layout\":[[0,18446744073709551616]]", "", NO_STEP},
        {LAYOUT, "\"layout\":[[null,6]]", "", NO_STEP},
        {LAYOUT, "\"layout\":[[true,6]]", "", NO_STEP},
        {LAYOUT, "\"layout\":[[0.0,6]]", "", NO_STEP},
        {LAYOUT, "\"layout\":[[\"\",6]]", "", NO_STEP},
        {LAYOUT, "\"layout\":[[[0],6]]", "", NO_STEP},
        {LAYOUT, "\"layout\":[0,6]", "", NO_STEP},
        {LAYOUT, "\"layout\":[[\"flat\",3],[0,2]]", "w", NO_PART},
        {LAYOUT, "\"layout\":[[\"flat\",3],[\"flat\",2]]", "w", NO_PART},
        {LAYOUT, "\"layout\":[[0,9223372036854775808],[1,2]]", "w", NO_FIT},
        {LAYOUT, "\"layout\":[[0,4294967296],[1,4294967296]]", "w", NO_FIT},
        {LAYOUT, "\"layout\":[[0,5]]", "w", NO_PART},
        {LAYOUT, "\"layout\":[[2,6]]", "w", NO_FIT},
        {LAYOUT, "\"layout\":[[0,1],[0,1],[0,1],[0,2],[\"flat\",3]]", "",
         "\"layout\" has too many steps"},
    };
    CHECK_LIES(lies);
}

TEST(bad_byte_ranges_are_refused)
{
#define OFFSETS "4096,1052680,4096,4120"
    static const lie lies[] = {
        {"0,0,1,1", "0,2,1,1", "w", "\"file\" is not one of the files"},
        {"0,0,1,1", "0,0,1,1,1", "", EXTRA("file")},
        {OFFSETS, "4096,7,4096,4120", "w", OUT_OF_RANGE("offset")},
        {OFFSETS, "4096,1052705,4096,4120", "w", BEYOND_FILE},
        {OFFSETS, "4096,9223372036854775808,4096,4120", "w", OUT_OF_RANGE("offset")},
        {OFFSETS, "4096,4088,4096,4120", "long",
         "\"offset\" overlaps another shard in the file"},
        {OFFSETS, "4096,1052680,4096,18446744073709551592", "x.y",
         OUT_OF_RANGE("offset")},
    };
    CHECK_LIES(lies);
}

TEST(bad_checksums_are_refused)
{
#define NO_BLOCKS "\"blocks\" must have 8 digits for each MiB of the layers"
#define CRCS      "11111111fedcba980000000100000000"
#define BLOCKS    ",\n\"blocks\":\"2222222233333333\""
    static const lie lies[] = {
        {CRCS, "11111111fedcba9g0000000100000000", "w", NO_HEX("crc32c")},
        {CRCS, "11111111FEDCBA980000000100000000", "w", NO_HEX("crc32c")},
        {CRCS, "11111111 edcba980000000100000000", "w", NO_HEX("crc32c")},
        {CRCS, "111111110xdcba980000000100000000", "w", NO_HEX("crc32c")},
        {CRCS, "11111111fedcba9800000001", "x.y",
         "\"crc32c\" has too few layers for the shards"},
        {CRCS, CRCS "00000000", "", EXTRA("crc32c")},
        {CRCS, "11111111fedcba980000000100000001", "x.y",
         "\"crc32c\" of an empty layer must be 00000000"},
        {BLOCKS, "", "long", NO_BLOCKS},
        {"2222222233333333", "222222223333333", "long", NO_BLOCKS},
        {"2222222233333333", "22222222333333334", "", EXTRA("blocks")},
        {"2222222233333333", "222222223333333A", "long", NO_HEX("blocks")},
    };
    CHECK_LIES(lies);
}

/* A message contains the offset in the text, the expected value and the actual one. */
TEST(messages_contain_offset_and_values)
{
    static const struct {
        const char *from, *to, *at, *text, *expected, *got;
    } lies[] = {
        {"0,0,1,1", "0,5,1,1", "5,1,1", "shard of 'w': \"file\" is not one of the files",
         "below 2", "5"},
        {"1,7,2,1", "1,x,2,1", "x,2,1", "shard of 'w': \"version\" is not a whole number",
         "1 to 9223372036854775807", "x"},
        {"4,6", "4,z", "z;", "shard of 'w': \"shape\" is not a whole number",
         "0 to 18446744073709551615", "z"},
        {"fedcba98", "fedcba9X", "fedcba9X", "shard of 'w': \"crc32c\" must have 8 hex",
         "", "fedcba9X"},
        {"\"F64\"", "\"F65\"", "\"F65\"", "\"dtype\" is unknown", "", "\"F65\""},
        {"\"format_version\":3", "\"format_version\":2", "2,\n\"gen",
         "\"format_version\" 2 is not supported: this mlstate reads version 3", "3", "2"},
    };
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        char text[INDEX_ROOM];
        const size_t length = change_index(good, lies[i].from, lies[i].to, text);
        CHECK(parse_index(text, length, &status) == MLS_E_FORMAT);
        const char *at = strstr(text, lies[i].at);
        REQUIRE(at != NULL);
        CHECK(status.offset == (uint64_t)(at - text));
        CHECK(strncmp(status.text, lies[i].text, strlen(lies[i].text)) == 0);
        CHECK_TEXT(status.expected, lies[i].expected);
        CHECK_TEXT(status.got, lies[i].got);
    }
}

TEST(any_replaced_value_is_refused_or_harmless)
{
    static const char *const values[] = {
        "null",   "true",
        "0",      "-1",
        "1e308",  "18446744073709551615",
        "\"\"",   "\"\\u0000\"",
        "[]",     "{}",
        "[[[]]]", "{\"a\":{}}",
        "[0,0]",  "\"0000000000000000\"",
    };
    size_t refused;
    const size_t all =
        replace_every_value(good, values, sizeof values / sizeof values[0], &refused);
    CHECK(all > 700 && refused > all * 3 / 4);
}

TEST(any_removed_piece_is_refused)
{
    /* the good index without one of its bytes, with a correct checksum: at worst
     * refused */
    for (size_t skip = sizeof MLS_JSON_CHECKSUM_START - 1; skip < sizeof good - 1;
         skip++) {
        char text[INDEX_ROOM];
        snprintf(text, sizeof text, "%.*s%s", (int)skip, good, good + skip + 1);
        (void)mls_json_checksum_set(text, strlen(text), &mls_crc_scalar);
        const mls_code code = parse_index(text, strlen(text), &status);
        CHECK(code == MLS_OK || code == MLS_E_FORMAT);
    }
    for (size_t length = sizeof MLS_JSON_CHECKSUM_START - 1; length < sizeof good - 2;
         length++) {
        char text[INDEX_ROOM];
        memcpy(text, good, length);
        (void)mls_json_checksum_set(text, length, &mls_crc_scalar);
        CHECK(parse_index(text, length, &status) == MLS_E_FORMAT);
    }
}
