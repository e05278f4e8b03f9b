// SPDX-License-Identifier: Apache-2.0

// Package spec is what a configuration wants of steering: services with their
// options and devices, and the arithmetic that follows from them alone: which
// bucket a source hashes to, and which slot a bucket belongs to. It reads no pins
// and changes nothing.
package spec
