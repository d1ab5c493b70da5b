#include "state/metadata_compare.h"
#include "support/runner.h"

static const size_t two_three[] = {2, 3};
static const size_t three_two[] = {3, 2};

static mls_tensor_meta facts(const size_t *shape, int rank, const char *dtype)
{
    return (mls_tensor_meta){.shape = shape, .rank = rank, .dtype = dtype};
}

static mls_fact_pair both(mls_tensor_meta source, mls_tensor_meta target)
{
    return (mls_fact_pair){
        .source = source, .target = target, .has_source = true, .has_target = true};
}

TEST(shapes_differ_by_rank_or_by_a_dimension)
{
    const mls_tensor_meta a = facts(two_three, 2, "float32");
    const mls_tensor_meta turned = facts(three_two, 2, "float32");
    const mls_tensor_meta shorter = facts(two_three, 1, "float32");
    const mls_tensor_meta scalar = facts(NULL, 0, "float32");
    CHECK(mls_tensor_meta_same_shape(&a, &a));
    CHECK(!mls_tensor_meta_same_shape(&a, &turned));
    CHECK(!mls_tensor_meta_same_shape(&a, &shorter) &&
          !mls_tensor_meta_same_shape(&shorter, &a));
    CHECK(mls_tensor_meta_same_shape(&scalar, &scalar) &&
          !mls_tensor_meta_same_shape(&scalar, &a));
}

TEST(dtypes_are_compared_as_text)
{
    char copy[] = "float32";
    const mls_tensor_meta a = facts(two_three, 2, "float32");
    const mls_tensor_meta same = facts(two_three, 2, copy);
    const mls_tensor_meta other = facts(two_three, 2, "float16");
    CHECK(mls_tensor_meta_same_dtype(&a, &same) &&
          !mls_tensor_meta_same_dtype(&a, &other));
}

TEST(each_pair_gets_its_bits_and_all_are_counted)
{
    const mls_tensor_meta a = facts(two_three, 2, "float32");
    const mls_tensor_meta turned = facts(three_two, 2, "float32");
    const mls_tensor_meta half = facts(two_three, 2, "float16");
    const mls_tensor_meta both_differ = facts(three_two, 2, "float16");
    const mls_fact_pair pairs[] = {
        both(a, a),
        {.source = a, .has_source = true},
        {.target = a, .has_target = true},
        both(a, turned),
        both(a, half),
        both(a, both_differ),
    };
    const unsigned char expected[] = {
        MLS_SAME,          MLS_MISSING,       MLS_UNEXPECTED,
        MLS_SHAPE_DIFFERS, MLS_DTYPE_DIFFERS, MLS_SHAPE_DIFFERS | MLS_DTYPE_DIFFERS};
    unsigned char bits[6];
    const mls_metadata_counts counts = mls_metadata_compare(pairs, 6, bits);
    CHECK(memcmp(bits, expected, sizeof expected) == 0);
    CHECK(counts.missing == 1 && counts.unexpected == 1);
    CHECK(counts.shapes == 2 && counts.dtypes == 2 && counts.same == 1);
}

TEST(empty_lists_have_no_differences)
{
    const mls_metadata_counts counts = mls_metadata_compare(NULL, 0, NULL);
    CHECK(counts.missing + counts.unexpected + counts.shapes + counts.dtypes == 0);
    CHECK(counts.same == 0);
}

TEST(a_digest_begins_with_lengths_and_dimensions)
{
    static const size_t dims[] = {3, 258};
    const mls_tensor_meta facts = {.shape = dims, .dtype = "float32", .rank = 2};
    const unsigned char expected[] = {2, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0,
                                      0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0,
                                      0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0};
    unsigned char head[MLS_FACTS_HEAD_MOST];
    CHECK(mls_tensor_meta_head((mls_str){"ab", 2}, &facts, head) == sizeof expected);
    CHECK(memcmp(head, expected, sizeof expected) == 0);
}
