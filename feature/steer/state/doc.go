// SPDX-License-Identifier: Apache-2.0

// Package state reads the state of steering on this host from pins and kernel: services, slots, devices and sessions.
// It serves status, plans, metrics and explanations. It changes nothing.
package state
