// SPDX-License-Identifier: Apache-2.0

// Package record is a service as its pins describe it: the truth that an engine's
// maps follow. It reads services, and computes a service's next record: its table,
// its devices' slots, the overrides of operators. It publishes nothing.
package record
