// SPDX-License-Identifier: Apache-2.0

// Package steer decides which member of a service gets each connection and
// datagram, in the kernel, for processes that know nothing of it.
//
// A source address hashes to one of [Buckets] buckets, a table maps the bucket
// to a slot, and the slot's sockets are those of its member. The program checks
// for every packet that the slot is whole; no process of weir's is needed for
// that. See README.md for the use, bpf/steer.h for the maps.
package steer

// ABI is the version of the map layouts in bpf/steer.h and templates.h. It rises with every
// change another weir would misread.
const ABI = 1

// Buckets is the number of buckets that source addresses hash to.
const Buckets = 4096

// Limits of one network namespace (bpf/steer.h).
const (
	MaxServices  = 1024
	MaxSlots     = 256 // of one service
	maxRows      = 4096
	maxEndpoints = 8 // sockets that a slot requires
	maxExits     = 16
)

// flags of struct service.
const (
	flagMoved   = 1
	flagMigrate = 2 // flagGenerations, 4, is in generations.go
)

// Name of the feature: pin directory, config key, command, metric prefix.
const Name = "steer"

// Instances that hold a namespace's programs and their maps, one for each engine.
const (
	lookupName = "@lookup"
	reuseName  = "@reuse"
)
