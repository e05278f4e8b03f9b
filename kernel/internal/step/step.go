// SPDX-License-Identifier: Apache-2.0

// Package step holds what package kerneltest sets and package kernel calls.
package step

// Hooks of tests; nil outside tests.
var (
	Hook     func(step string)           // called at every step
	Fail     func(step string) error     // fails a change at a step, if it returns an error
	Exchange func(from, to string) error // in place of the exchange of two directories
)
