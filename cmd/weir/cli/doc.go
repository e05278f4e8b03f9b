// SPDX-License-Identifier: Apache-2.0

// Package cli holds the parts shared by the commands of weir: common flags, usage errors, tables, JSON, and formats of
// times and sizes. A feature's command file registers its commands with [Add].
package cli
