// SPDX-License-Identifier: Apache-2.0

// Package explain describes how steering handles one packet, step by step.
package explain
