// SPDX-License-Identifier: Apache-2.0

// Package spec defines the wanted state of steering: services with their options and devices. It also computes from
// these the bucket of a source and the slot of a bucket. It reads no pins and changes nothing.
package spec
