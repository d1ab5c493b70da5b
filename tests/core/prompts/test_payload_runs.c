/* Strided views: their bytes come in C order, in runs as long as possible. */
#include "prompts/payload_runs.h"
#include "support/tensors.h"

static size_t collect(const mls_tensor *view, unsigned char *out)
{
    mls_payload_runs runs;
    size_t bytes = 0;
    mls_payload_runs_init(&runs, view);
    for (unsigned char *run; (run = mls_payload_runs_next(&runs)) != NULL;) {
        memcpy(out + bytes, run, runs.bytes);
        bytes += runs.bytes;
    }
    CHECK(mls_payload_runs_next(&runs) == NULL);
    return bytes;
}

static mls_payload_runs runs_of(const mls_tensor *view)
{
    mls_payload_runs runs;
    mls_payload_runs_init(&runs, view);
    return runs;
}

TEST(a_packed_view_is_one_run)
{
    unsigned char data[24], out[24];
    for (unsigned char i = 0; i < 24; i++) {
        data[i] = i;
    }
    const mls_tensor view = tensor_of(data, MLS_U8, 3, (const size_t[]){2, 3, 4});
    CHECK(runs_of(&view).bytes == 24 && mls_payload_runs_are_long(&(mls_payload_runs){
                                            .view = &view, .rank = 0, .bytes = 24}));
    CHECK(collect(&view, out) == 24 && memcmp(data, out, 24) == 0);
}

TEST(a_slice_of_the_middle_axis_has_a_run_for_each_outer_index)
{
    unsigned char data[24], out[24];
    for (unsigned char i = 0; i < 24; i++) {
        data[i] = i;
    }
    const mls_tensor all = tensor_of(data, MLS_U8, 3, (const size_t[]){2, 3, 4});
    const mls_tensor view = mls_tensor_slice(&all, 1, 1, 2);
    CHECK(runs_of(&view).bytes == 8);
    CHECK(collect(&view, out) == 16);
    CHECK(out[0] == 4 && out[7] == 11 && out[8] == 16 && out[15] == 23);
}

TEST(negative_strides_and_transposed_views_keep_their_order)
{
    unsigned char data[6] = {0, 1, 2, 3, 4, 5}, out[6];
    mls_tensor view = vector_of(data + 5, MLS_U8, 6);
    view.strides[0] = -1;
    CHECK(collect(&view, out) == 6 && out[0] == 5 && out[5] == 0);
    view = transposed_of(data, MLS_U8, 3, 2);
    CHECK(collect(&view, out) == 6 && out[0] == 0 && out[1] == 3 && out[2] == 1);
}

TEST(empty_views_and_single_elements_end)
{
    unsigned char data[4] = {7}, out[4];
    mls_tensor view = tensor_of(data, MLS_U8, 0, NULL);
    CHECK(collect(&view, out) == 1 && out[0] == 7);
    view = matrix_of(data, MLS_U8, 0, 3);
    CHECK(collect(&view, out) == 0);
    view = matrix_of(data, MLS_U8, 3, 0);
    CHECK(collect(&view, out) == 0);
}

TEST(short_runs_and_swapped_items_are_not_long)
{
    static unsigned char data[4096];
    mls_tensor view = matrix_of(data, MLS_U16, 2, 1000);
    mls_payload_runs runs = runs_of(&view);
    CHECK(mls_payload_runs_are_long(&runs));
    view.swapped = true;
    CHECK(!mls_payload_runs_are_long(&runs));
    view.swapped = false;
    const mls_tensor narrow = mls_tensor_slice(&view, 1, 0, 100);
    runs = runs_of(&narrow);
    CHECK(runs.bytes == 200 && !mls_payload_runs_are_long(&runs));
}
