// SPDX-License-Identifier: Apache-2.0

// Package reset resets TCP sessions at another slot than the one of their device,
// with a bounded rate, without the write lock.
package reset
