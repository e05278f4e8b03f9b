// SPDX-License-Identifier: Apache-2.0

// Package steer implements the feature steer: it assigns the traffic of a service to numbered slots, and delivers it to
// the sockets of each slot's member.
//
// The package connects steering to host: it plans and applies configurations ([Feature]), predicts outages and resets,
// and watches for members in weir serve. The packages below it do the work, from the ground up: spec, record, slots,
// engine, sockholder, bindings, state, reset, templates, explain and daemon. docs/ARCHITECTURE.md describes them.
package steer
