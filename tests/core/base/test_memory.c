#include "base/memory.h"
#include "support/runner.h"

TEST(blocks_are_zeroed_and_overflow_gives_null)
{
    unsigned char *block = mls_alloc(10, 3);
    REQUIRE(block != NULL);
    for (int i = 0; i < 30; i++) {
        CHECK(block[i] == 0);
    }
    mls_free(block);
    CHECK(mls_alloc(SIZE_MAX / 2, 3) == NULL);
    CHECK(mls_realloc(NULL, SIZE_MAX / 2, 3) == NULL);
    mls_free(NULL);
}

TEST(zero_byte_allocation_returns_a_block)
{
    void *block = mls_alloc(0, 8);
    CHECK(block != NULL);
    block = mls_realloc(block, 0, 8);
    CHECK(block != NULL);
    mls_free(block);
}

TEST(growth_doubles_a_full_block_and_failure_keeps_it)
{
    size_t room = 0;
    unsigned *block = NULL;
    for (unsigned i = 0; i < 40; i++) {
        unsigned *grown = mls_grow(block, i, &room, sizeof *grown);
        REQUIRE(grown != NULL);
        CHECK(i < room && (i == 0 || room <= 2 * i || grown == block));
        block = grown;
        block[i] = i;
    }
    CHECK(room == 64 && block[0] == 0 && block[39] == 39);
    CHECK(mls_grow(block, room, &room, SIZE_MAX / 100) == NULL);
    CHECK(room == 64 && block[39] == 39);
    mls_free(block);
}

TEST(grown_pages_keep_content_and_append_zeros)
{
    mls_pages pages = {0};
    const size_t page = mls_page_bytes();
    REQUIRE(mls_pages_init(&pages, 100, &status) == MLS_OK);
    CHECK(pages.mapped == page && pages.bytes == 100);
    memset(pages.data, 7, 100);
    REQUIRE(mls_pages_grow(&pages, 300 * page + 1, &status) == MLS_OK);
    CHECK(pages.mapped == 301 * page);
    CHECK(pages.data[99] == 7 && pages.data[100] == 0 && pages.data[300 * page] == 0);
    mls_advise_pages(pages.data, pages.mapped, false);
    mls_advise_pages(pages.data, pages.mapped, true);
    mls_advise_pages(pages.data + 1, 10, true); /* contains no whole page */
    mls_populate_pages(pages.data, pages.mapped);
    mls_populate_pages(pages.data + 1, 10);
    CHECK(pages.data[99] == 7 && pages.data[200 * page] == 0);
    mls_pages_fini(&pages);
    CHECK(pages.data == NULL);
    mls_pages_fini(&pages);
}

TEST(growth_inside_the_last_page_keeps_the_address)
{
    mls_pages pages = {0};
    REQUIRE(mls_pages_init(&pages, 1, &status) == MLS_OK);
    const unsigned char *before = pages.data;
    CHECK(mls_pages_grow(&pages, 2, &status) == MLS_OK);
    CHECK(pages.data == before && pages.bytes == 2);
    mls_pages_fini(&pages);
}

/* The kernel keeps parts that differed in advice when they were first written. */
TEST(a_range_grows_after_advice_for_a_part)
{
    mls_pages pages = {0};
    const size_t bytes = (size_t)8 << 20;
    REQUIRE(mls_pages_init(&pages, bytes, &status) == MLS_OK);
    mls_advise_pages(pages.data, pages.mapped, false);
    mls_advise_inner_huge_pages(pages.data, bytes / 2);
    memset(pages.data, 7, bytes);
    mls_advise_pages(pages.data, pages.mapped, false);
    REQUIRE(mls_pages_grow(&pages, 2 * bytes, &status) == MLS_OK);
    CHECK(pages.mapped == 2 * bytes && pages.data[0] == 7);
    CHECK(memcmp(pages.data, pages.data + 1, bytes - 1) == 0);
    CHECK(pages.data[bytes] == 0 && pages.data[2 * bytes - 1] == 0);
    mls_pages_fini(&pages);
}

TEST(refused_growth_keeps_the_range)
{
    mls_pages pages = {0};
    CHECK(mls_pages_init(&pages, SIZE_MAX - 1, &status) == MLS_E_MEMORY);
    CHECK(pages.data == NULL);
    REQUIRE(mls_pages_init(&pages, 10, &status) == MLS_OK);
    const mls_pages before = pages;
    CHECK(mls_pages_grow(&pages, SIZE_MAX / 2, &status) == MLS_E_MEMORY);
    CHECK(mls_pages_grow(&pages, 9, &status) == MLS_E_MEMORY); /* smaller */
    CHECK(memcmp(&before, &pages, sizeof pages) == 0);
    CHECK(status.text[0] != '\0');
    mls_pages_fini(&pages);
}
