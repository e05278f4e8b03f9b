// SPDX-License-Identifier: Apache-2.0

// Package host manages the whole host. It loads the configuration, plans and applies it through the features, reads
// their state for status and metrics, and runs their long-lived tasks.
package host
