// SPDX-License-Identifier: Apache-2.0

// Package sharktest compares weir filter test with tshark. It has a table of expressions with
// equivalent display filters, tried on captures of real routers and on generated packets. It has
// only tests.
package sharktest
