/* transition: move a KV cache to a smaller context, quantize it, and move it back.
 *
 *   make install-kv PREFIX=DIR
 *   cc transition.c -IDIR/include -LDIR/lib -lmlstate_kv -Wl,-rpath,DIR/lib
 */
#include <mlstate/kv.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, HEADS = 2, LARGE = 512, SMALL = 256, DIM = 64, TOKENS = 180 };
enum { GROUP = 32, BITS = 8 };

/* (layers, heads, sequence, head dimension) */
static float large[LAYERS][HEADS][LARGE][DIM];
static float small[LAYERS][HEADS][SMALL][DIM];
static uint32_t codes[LAYERS][HEADS][SMALL][DIM * BITS / 32];
static float scales[LAYERS][HEADS][SMALL][DIM / GROUP];
static float biases[LAYERS][HEADS][SMALL][DIM / GROUP];
static float mask[1][SMALL];

static void check(const char *step, int code)
{
    if (code != MLSTATE_KV_OK) {
        fprintf(stderr, "%s: %s\n", step, mlstate_kv_error_text(code));
        exit(1);
    }
    printf("%s: done\n", step);
}

/* Store a different number in every element of the first TOKENS positions. */
static void prefill(void)
{
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int head = 0; head < HEADS; head++) {
            for (int token = 0; token < TOKENS; token++) {
                for (int i = 0; i < DIM; i++) {
                    large[layer][head][token][i] =
                        (float)(layer + head + token) + (float)i / DIM;
                }
            }
        }
    }
}

int main(void)
{
    const int64_t large_shape[] = {LAYERS, HEADS, LARGE, DIM};
    const int64_t small_shape[] = {LAYERS, HEADS, SMALL, DIM};
    if (mlstate_kv_version() / 1000 != MLSTATE_KV_VERSION_MAJOR) {
        fputs("the library does not fit the header\n", stderr);
        return 1;
    }
    prefill();
    check("compact",
          mlstate_kv_compact(large, MLSTATE_KV_FLOAT32, NULL, small, MLSTATE_KV_FLOAT32,
                             NULL, large_shape, 4, -2, SMALL, TOKENS));
    check("mask", mlstate_kv_mask(mask, MLSTATE_KV_FLOAT32, SMALL, SMALL, 64, 4, TOKENS,
                                  TOKENS + 1, -65504));
    check("quantize",
          mlstate_kv_quantize(small, MLSTATE_KV_FLOAT32, NULL, small_shape, 4, BITS,
                              GROUP, &codes[0][0][0][0], scales, biases));
    memset(small, 0, sizeof small);
    check("dequantize",
          mlstate_kv_dequantize(small, MLSTATE_KV_FLOAT32, NULL, small_shape, 4, BITS,
                                GROUP, &codes[0][0][0][0], scales, biases));
    check("expand",
          mlstate_kv_expand(small, MLSTATE_KV_FLOAT32, NULL, large, MLSTATE_KV_FLOAT32,
                            NULL, small_shape, 4, -2, LARGE, TOKENS, 0));
    printf("token %d: %.3f, next: %.3f\n", TOKENS - 1,
           (double)large[1][1][TOKENS - 1][DIM / 2], (double)large[1][1][TOKENS][0]);
    printf("attends to token %d: %s\n", TOKENS - 65,
           mask[0][TOKENS - 65] < 0 ? "no" : "yes");
    const int code =
        mlstate_kv_compact(large, MLSTATE_KV_FLOAT32, NULL, small, MLSTATE_KV_FLOAT32,
                           NULL, large_shape, 4, -2, SMALL, SMALL + 1);
    printf("%d tokens in %d positions: %s\n", SMALL + 1, SMALL,
           mlstate_kv_error_text(code));
    return code == MLSTATE_KV_ERROR_CAPACITY ? 0 : 1;
}
