// SPDX-License-Identifier: Apache-2.0

// Package cli is what the commands of weir share: flags of every command, usage errors, tables, JSON, times and sizes. A feature's
// command file adds its commands by Add.
package cli
