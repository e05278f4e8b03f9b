// SPDX-License-Identifier: Apache-2.0

// Package state reads what the pins and the kernel say of steering on this host, for
// status, plans, metrics and explanations: services, slots, devices, sessions.
// It changes nothing.
package state
