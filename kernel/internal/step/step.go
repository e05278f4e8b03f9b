// SPDX-License-Identifier: Apache-2.0

// Package step holds variables set by package kerneltest and used by package kernel.
package step

// Hooks of tests; nil outside tests.
var (
	Hook     func(step string)           // called at every step
	Fail     func(step string) error     // fails a change at a step by returning an error
	Exchange func(from, to string) error // replaces the exchange of two directories
)
