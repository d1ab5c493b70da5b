/* Building headers: order, offsets, room for checksums. */
#include "base/memory.h"
#include "base/size.h"
#include "safetensors/safetensors_header_build.h"
#include "support/runner.h"
#include "support/text.h"

static const mls_crc_kernels *const crc = &mls_crc_scalar;

static const size_t five[] = {5}, matrix[] = {2, 3}, none[] = {0, 4};

static mls_header_tensor tensor(const char *name, mls_dtype dtype, int rank,
                                const size_t *shape)
{
    size_t bytes = mls_dtype_of(dtype)->item_bytes;
    for (int axis = 0; axis < rank; axis++) {
        bytes *= shape[axis];
    }
    return (mls_header_tensor){
        .name = text(name), .dtype = dtype, .rank = rank, .shape = shape, .bytes = bytes};
}

/* ---- of the current test ---- */

static mls_header_tensor tensors[4];
static mls_header h;
static mls_safetensors file;

static void drop(void)
{
    mls_safetensors_fini(&file);
    mls_header_fini(&h);
}

/* Four tensors, not in the file's order, numbered by position. */
static void four(void)
{
    tensors[0] = tensor("b", MLS_U8, 1, five);
    tensors[1] = tensor("a", MLS_U8, 1, five);
    tensors[2] = tensor("z", MLS_F32, 2, matrix);
    tensors[3] = tensor("none", MLS_F64, 2, none);
    for (size_t i = 0; i < 4; i++) {
        tensors[i].number = i;
    }
}

BEFORE_EACH
{
    four();
}

AFTER_EACH
{
    drop();
}

/* Whether the finished text is the start of a valid file of mlstate; stores its header in
 * `file`. */
static bool parses(void)
{
    const mls_code code =
        mls_safetensors_parse((const unsigned char *)h.text.data, h.text.length,
                              h.file_bytes, crc, true, &file, &status);
    if (code != MLS_OK) {
        printf("    %s\n", status.text);
    }
    return code == MLS_OK && file.has_crc;
}

TEST(tensors_are_sorted_by_item_size_then_name)
{
    static const char *const order[] = {"none", "z", "a", "b"};
    static const size_t numbers[] = {3, 2, 1, 0};
    REQUIRE(mls_header_init(&h, tensors, 4, NULL, 0, 64, &status) == MLS_OK);
    (void)mls_header_finish(&h, crc);
    CHECK(h.count == 4 && h.tensors == tensors);
    REQUIRE(parses() && file.count == 4);
    for (size_t i = 0; i < 4; i++) {
        const mls_stored *stored = &file.tensors[i];
        CHECK(mls_str_is(tensors[i].name, order[i]) && tensors[i].number == numbers[i]);
        CHECK(mls_str_equal(stored->name, tensors[i].name));
        CHECK(stored->offset == tensors[i].offset && stored->bytes == tensors[i].bytes);
        CHECK(stored->dtype == tensors[i].dtype && stored->rank == tensors[i].rank);
        CHECK(tensors[i].offset % mls_dtype_of(tensors[i].dtype)->item_bytes == 0);
    }
    CHECK(h.file_bytes == h.text.length + 34);
    drop();
    CHECK(h.text.data == NULL && h.crcs == NULL);
}

TEST(payload_has_the_requested_alignment)
{
    static const size_t alignments[] = {8, 64, 512, 4096, 1 << 16};
    for (size_t i = 0; i < sizeof alignments / sizeof alignments[0]; i++) {
        four();
        REQUIRE(mls_header_init(&h, tensors, 4, NULL, 0, alignments[i], &status) ==
                MLS_OK);
        CHECK(h.text.length % alignments[i] == 0 && tensors[0].offset == h.text.length);
        CHECK(h.text.length <= 512 || h.text.length == alignments[i]);
        drop();
    }
}

/* Metadata of increasing length, beyond the next multiple of the alignment. */
TEST(payload_is_aligned_at_every_header_length)
{
    char long_value[200];
    memset(long_value, 'x', sizeof long_value);
    for (size_t length = 0; length < sizeof long_value; length++) {
        const mls_str_pair pair = {text("key"), {long_value, length}};
        four();
        REQUIRE(mls_header_init(&h, tensors, 4, &pair, 1, 64, &status) == MLS_OK);
        (void)mls_header_finish(&h, crc);
        CHECK(h.text.length % 64 == 0);
        CHECK(mls_load_le64((unsigned char *)h.text.data) == h.text.length - 8);
        REQUIRE(parses() && file.metadata_count == 1);
        CHECK(file.metadata[0].value.length == length);
        drop();
    }
}

/* Whether the text at `at` contains these digits, such as "0000abcd". */
static bool digits_are(size_t at, uint32_t value)
{
    char digits[9];
    snprintf(digits, sizeof digits, "%08x", (unsigned)value);
    return memcmp(h.text.data + at, digits, 8) == 0;
}

TEST(each_block_has_checksum_digits)
{
    enum { BLOCK = MLS_SAFETENSORS_BLOCK };
    static const size_t sizes[] = {BLOCK, BLOCK + 1, 3 * BLOCK, 0, 1};
    static const char *const names[] = {"a", "b", "c", "d", "e"};
    mls_header_tensor blocks[5];
    for (size_t i = 0; i < 5; i++) {
        blocks[i] = tensor(names[i], MLS_U8, 1, &sizes[i]);
    }
    REQUIRE(mls_header_init(&h, blocks, 5, NULL, 0, 4096, &status) == MLS_OK);
    REQUIRE(h.block_count == 1 + 2 + 3 + 0 + 1);
    CHECK(blocks[0].crcs == h.crcs && blocks[4].crcs == h.crcs + 6);
    for (size_t i = 0; i < h.block_count; i++) {
        CHECK(h.crcs[i] == 0 && digits_are(h.block_crcs_at + 8 * i, 0));
        h.crcs[i] = (uint32_t)(0x01234567 * (i + 1));
    }
    const size_t length = h.text.length;
    const uint32_t checksum = mls_header_finish(&h, crc);
    CHECK(h.text.length == length); /* nothing moved */
    for (size_t i = 0; i < h.block_count; i++) {
        CHECK(digits_are(h.block_crcs_at + 8 * i, h.crcs[i]));
    }
    CHECK(digits_are(h.header_crc_at, checksum));
    REQUIRE(parses());
    CHECK(file.header_crc == checksum);
    CHECK(memcmp(file.tensors[1].block_digits, "02468ace", 8) == 0);
}

TEST(header_checksum_covers_zeroed_digits)
{
    REQUIRE(mls_header_init(&h, tensors, 4, NULL, 0, 64, &status) == MLS_OK);
    const uint32_t checksum = mls_header_finish(&h, crc);
    memcpy(h.text.data + h.header_crc_at, "00000000", 8);
    CHECK(crc->update(0, h.text.data, h.text.length) == checksum);
}

/* The metadata of mlx-lm is one tree: other keys than these would break its parser. */
TEST(own_keys_are_in_the_branch_of_the_metadata)
{
    static const char *const names[] = {"\"mlstate.", "\"0.mlstate.", "\"1.mlstate."};
    const struct {
        mls_str_pair pairs[3];
        size_t count, branch;
    } cases[] = {
        {{{text("2.0"), text("")}, {text("1.0"), text("KVCache")}}, 2, 1},
        {{{text("2.0"), text("KVCache")}, {text("0.0"), text("")}}, 2, 2},
        {{{text("2.0"), text("")}, {text("format"), text("pt")}}, 2, 0},
        {{{text("1.0"), text("a")}, {text("0.0"), text("")}}, 2, 0},
        {{{text("3.0"), text("")}, {text("2.0"), text("")}}, 2, 0},
        {{{text("2.0"), text("")}, {text(MLS_SAFETENSORS_STATE), text("{}")}}, 2, 1},
        {{{text("2"), text("")}}, 1, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mls_header_tensor unused;
        REQUIRE(mls_header_init(&h, &unused, 0, cases[i].pairs, cases[i].count, 8,
                                &status) == MLS_OK);
        (void)mls_header_finish(&h, crc);
        mls_json_writer_put(&h.text, "", 1); /* terminated for strstr */
        h.text.length--;
        for (size_t branch = 0; branch < 3; branch++) {
            const bool has_keys = strstr(h.text.data + 8, names[branch]) != NULL;
            CHECK(has_keys == (branch == cases[i].branch));
        }
        REQUIRE(parses());
        CHECK(file.has_crc && file.metadata_count == cases[i].count);
        for (size_t k = 0; k < file.metadata_count; k++) {
            CHECK(!mls_str_starts(file.metadata[k].key, text("0.mlstate.")));
        }
        mls_safetensors_fini(&file);
        mls_header_fini(&h);
    }
    CHECK(mls_str_is(mls_safetensors_own_key(text("1.mlstate.x")), "mlstate.x"));
    CHECK(mls_str_is(mls_safetensors_own_key(text("2.mlstate.x")), "2.mlstate.x"));
    CHECK(mls_str_is(mls_safetensors_own_key(text("0.mlstat")), "0.mlstat"));
    CHECK(mls_str_is(mls_safetensors_own_key(text("0.")), "0."));
    CHECK(mls_str_is(mls_safetensors_own_key(text("")), ""));
}

TEST(metadata_is_sorted_by_key)
{
    const mls_str_pair pairs[] = {{text("z"), text("\"\\")},
                                  {text("mlstate.shards"), text("{}")},
                                  {text("a"), text("")}};
    mls_header_tensor unused;
    REQUIRE(mls_header_init(&h, &unused, 0, pairs, 3, 8, &status) == MLS_OK);
    (void)mls_header_finish(&h, crc);
    mls_json_writer_put(&h.text, "", 1); /* terminated for strstr */
    h.text.length--;
    const char *at = h.text.data + 8, *before = at;
    static const char *const keys[] = {"\"a\":\"\"", "\"mlstate.blocks.crc32c\":\"\"",
                                       "\"mlstate.header.crc32c\":\"",
                                       "\"mlstate.shards\":\"{}\"", "\"z\":\"\\\"\\\\\""};
    for (size_t i = 0; i < 5; i++) {
        const char *position = strstr(at, keys[i]);
        CHECK(position != NULL && position > before);
        before = position != NULL ? position : before;
    }
    REQUIRE(parses());
    CHECK(file.count == 0 && h.file_bytes == h.text.length);
}

/* Refused, with the tensor's name, and with nothing to release. */
static bool refuses(mls_header_tensor *bad, size_t count, const mls_str_pair *pairs,
                    size_t pair_count, const char *name, const char *why)
{
    mls_header untouched = {.count = 77};
    mls_status st;
    const mls_code code =
        mls_header_init(&untouched, bad, count, pairs, pair_count, 64, &st);
    return code == MLS_E_VALUE && untouched.count == 77 && untouched.text.data == NULL &&
           strcmp(st.name, name) == 0 && strstr(st.text, why) != NULL;
}

TEST(reserved_and_duplicate_names_are_refused)
{
    mls_header_tensor three[3];
    for (size_t i = 0; i < 3; i++) {
        three[i] = tensor(i == 1 ? "other" : "same", i == 0 ? MLS_U8 : MLS_F32, 1, five);
    }
    CHECK(refuses(three, 3, NULL, 0, "same", "twice")); /* for any dtypes */
    mls_header_tensor item = tensor("__metadata__", MLS_U8, 1, five);
    CHECK(refuses(&item, 1, NULL, 0, "__metadata__", "reserved"));
    item = tensor("a\xC3", MLS_U8, 1, five);
    CHECK(refuses(&item, 1, NULL, 0, "a", "UTF-8")); /* the printable part of the name */
    item = tensor("a", MLS_U8, 1, five);
    const mls_str_pair twice[] = {
        {text("k"), text("1")}, {text("l"), text("2")}, {text("k"), text("3")}};
    CHECK(refuses(&item, 1, twice, 3, "k", "twice"));
    const mls_str_pair reserved = {text("mlstate.blocks.crc32c"), text("00000000")};
    CHECK(refuses(&item, 1, &reserved, 1, "mlstate.blocks.crc32c", "twice"));
    const mls_str_pair value = {text("k"), text("\xFF")};
    CHECK(refuses(&item, 1, &value, 1, "k", "UTF-8"));
}

TEST(long_names_do_not_truncate_the_reason)
{
    char name[1000];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    mls_header_tensor twins[2] = {tensor(name, MLS_U8, 1, five),
                                  tensor(name, MLS_U8, 1, five)};
    mls_header untouched;
    CHECK(mls_header_init(&untouched, twins, 2, NULL, 0, 64, &status) == MLS_E_VALUE);
    CHECK(strstr(status.text, "nnn' appears twice") != NULL);
}
