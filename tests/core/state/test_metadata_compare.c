#include "state/metadata_compare.h"
#include "support/runner.h"

TEST(a_digest_begins_with_lengths_and_dimensions)
{
    static const size_t dims[] = {3, 258};
    const mls_tensor_meta meta = {.shape = dims, .dtype = "float32", .rank = 2};
    const unsigned char expected[] = {2, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0,
                                      0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0,
                                      0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0};
    unsigned char head[MLS_META_HEAD_MOST];
    CHECK(mls_tensor_meta_head((mls_str){"ab", 2}, &meta, head) == sizeof expected);
    CHECK(memcmp(head, expected, sizeof expected) == 0);
    /* the text of a part counts as part of the dtype's name, after a space */
    mls_tensor_meta part = meta;
    part.part = "(3, 258)[0:1, 0:258]";
    CHECK(mls_tensor_meta_head((mls_str){"ab", 2}, &part, head) == sizeof expected);
    CHECK(head[8] == 7 + 1 + strlen(part.part));
}
