/* exact_float: forbids fused multiply-add in the file that includes it, so that every
 * machine computes the same bits.
 *
 * Every instruction set must round each product and each sum. The Makefiles pass
 * -ffp-contract=off; a package manager that compiles the sources may not, and clang then
 * fuses products and sums on arm64. gcc does not know the pragma, so it needs the option.
 * Include it before functions that use floats.
 */
#ifndef MLS_EXACT_FLOAT_H
#define MLS_EXACT_FLOAT_H

#if defined(__clang__)
#    pragma STDC FP_CONTRACT OFF
#endif

#endif
