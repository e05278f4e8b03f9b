// SPDX-License-Identifier: Apache-2.0

// Package sharktest holds weir filter test to tshark: a table of expressions and of the display filters that are to mean
// the same, over captures of real routers and over packets that it makes itself. Its tests alone matter.
package sharktest
