// SPDX-License-Identifier: Apache-2.0

// Package engine changes one engine of a network namespace: its maps, links and programs, and the records of its
// services. [Engine.Reconcile] makes the maps follow the records. It also recovers the work of a killed writer. Callers
// hold the write lock.
//
// [AdmitLocked] and [Admit] give slots to members. FinishMove and [RecoverEngine] complete changes that a kill
// interrupted.
package engine
