// SPDX-License-Identifier: Apache-2.0

// Package daemon runs a daemon as the member of a slot, and retires a daemon in favor of its successor.
package daemon
