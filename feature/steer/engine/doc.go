// SPDX-License-Identifier: Apache-2.0

// Package engine changes one engine of a network namespace: its maps, links and
// programs, and the records of its services. The maps follow the records by Sync,
// which also recovers the work of a killed writer. Callers hold the write lock.
//
// AdmitLocked and Admit give slots to members, Bypass takes a service out of the
// way, FinishMove and RecoverEngine complete what a kill left half done.
package engine
