// SPDX-License-Identifier: Apache-2.0

// Package reset resets misplaced TCP sessions: sessions of a member in another slot than their device's. It limits the
// rate and does not hold the write lock.
package reset
