// SPDX-License-Identifier: Apache-2.0

package spec

// Buckets is the number of buckets that source addresses hash to.
const Buckets = 4096

// Limits of one network namespace (bpf/steer.h).
const (
	MaxServices  = 1024
	MaxSlots     = 256 // of one service
	MaxRows      = 4096
	MaxEndpoints = 8 // sockets required by a slot
	MaxExits     = 16
)

// Name is the feature's name: pin directory, config key, command and metric prefix.
const Name = "steer"

// Rows returns the number of rows that the service needs in its engine's maps.
func (s Service) Rows() int {
	if s.Generations != nil {
		return 2 * s.Slots
	}
	return s.Slots
}
