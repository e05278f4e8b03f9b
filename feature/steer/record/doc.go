// SPDX-License-Identifier: Apache-2.0

// Package record describes a service as pinned. The engine's maps follow this record. The package reads services and
// computes a service's next record: its table, the slots of its devices, and the overrides of operators. It publishes
// nothing.
package record
