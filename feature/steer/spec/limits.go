// SPDX-License-Identifier: Apache-2.0

package spec

// Buckets is the number of buckets that source addresses hash to.
const Buckets = 4096

// Limits of one network namespace (bpf/steer.h).
const (
	MaxServices  = 1024
	MaxSlots     = 256 // of one service
	MaxRows      = 4096
	MaxEndpoints = 8 // sockets that a slot requires
	MaxExits     = 16
)

// Name of the feature: pin directory, config key, command, metric prefix.
const Name = "steer"

// Rows are how many rows of its engine's maps a service takes.
func (s Service) Rows() int {
	if s.Generations != nil {
		return 2 * s.Slots
	}
	return s.Slots
}
