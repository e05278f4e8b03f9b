// SPDX-License-Identifier: Apache-2.0

// Package explain says what steering does with one packet, step by step.
package explain
