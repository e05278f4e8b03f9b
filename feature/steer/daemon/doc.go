// SPDX-License-Identifier: Apache-2.0

// Package daemon runs a daemon as the member of a slot, and retires one for its
// successor.
package daemon
